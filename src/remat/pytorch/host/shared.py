"""The stores that plans of this process use: one for each place and device, open while the process runs.

In: where values may spend a while, as a user writes it, and a device. Out: a store for running, and what plans know of
it. A place that cannot be used, or a store that cannot take a value, is told once: values stay on the device, and what
is planned from then on does without.
"""

from __future__ import annotations

import functools
import warnings

import torch

from remat.core.copies import Link, OffloadPlace
from remat.core.problem import LARGEST_BYTES
from remat.errors import OffloadFailed
from remat.pytorch.host.levels import parse_level
from remat.pytorch.host.rates import copy_rates, is_beside
from remat.pytorch.host.store import Store, Strided, Ticket


def checked_place(text: str | None) -> str:
    """As a user writes it, where that can be understood; empty for nowhere."""
    if text is None:
        return ""
    parse_level(text)
    return text


def place_for_plans(where: str, device: torch.device) -> OffloadPlace | None:
    """What plans know of a place; None where it cannot be used."""
    if not where or has_failed(where, device):
        return None
    level = parse_level(where)
    try:
        link = link_to(where, device)
    except OffloadFailed as error:
        shared_store(where, device).give_up(error)
        return None
    return OffloadPlace(where, link, LARGEST_BYTES if level.budget_bytes is None else level.budget_bytes)


@functools.cache
def link_to(where: str, device: torch.device) -> Link:
    level = parse_level(where)
    rates = copy_rates(level, device)
    latency = max(rates.out_latency_ns, rates.back_latency_ns)
    return Link(rates.out_bytes_per_ns, rates.back_bytes_per_ns, latency, is_beside(level, device))


def has_failed(where: str, device: torch.device) -> bool:
    """Whether a store has been tried there that could not be used."""
    return shared_store(where, device).has_failed


@functools.cache
def shared_store(where: str, device: torch.device) -> LenientStore:
    return LenientStore(where, device)


class LenientStore:
    """A store that never refuses."""

    def __init__(self, where: str, device: torch.device) -> None:
        self._where, self._device = where, device
        self._opened: Store | None = None
        self.has_failed = False

    @property
    def inner(self) -> Store:
        """Opened when it is first needed."""
        if self._opened is None:
            self._opened = parse_level(self._where).open(self._device)
        return self._opened

    def give_up(self, error: OffloadFailed) -> None:
        self.has_failed = True
        warnings.warn(f"{error} Nothing is offloaded from here on: the next steps are planned without.", stacklevel=3)

    def copy_out(self, tensor: torch.Tensor) -> Ticket:
        if not self.has_failed:
            try:
                return self.inner.copy_out(tensor)
            except OffloadFailed as error:
                self.give_up(error)
        return StayedTicket(tensor)

    def copy_back(self, ticket: Ticket) -> torch.Tensor:
        return ticket.tensor if isinstance(ticket, StayedTicket) else self.inner.copy_back(ticket)

    def release(self, ticket: Ticket) -> None:
        if not isinstance(ticket, StayedTicket):
            self.inner.release(ticket)

    @property
    def used_bytes(self) -> int:
        return self.inner.used_bytes


class StayedTicket:
    """Of a tensor that did not leave."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def elsewhere(self) -> StayedTicket:
        """One of a tensor alike in other memory of the device."""
        like = Strided.of(self.tensor)
        copied = like.empty(self.tensor.device).copy_(like.flat(self.tensor))
        return StayedTicket(like.shaped(copied))

    def wait_out(self) -> None:
        """There is no copy."""

    def wait_back(self) -> None:
        """There is no copy."""
