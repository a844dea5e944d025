"""The stores that plans of this process use: one for each place and device, open while the process runs.

In: where values may spend a while, as a user writes it, and a device. Out: a store for running, and what plans
know of it. A store that cannot take a value lets it stay on the device, and says so once: a training that has begun
goes on, with more memory.
"""

from __future__ import annotations

import functools
import warnings

import torch

from remat.core.copies import OffloadPlace
from remat.core.problem import LARGEST_BYTES
from remat.errors import OffloadFailed
from remat.pytorch.host.levels import parse_level
from remat.pytorch.host.link import measured_link
from remat.pytorch.host.store import Store, Ticket


def checked_place(text: str | None) -> str:
    """As a user writes it, where that can be understood; empty for nowhere."""
    if text is None:
        return ""
    parse_level(text)
    return text


def host_of(where: str, device: torch.device) -> OffloadPlace:
    """What plans know of a place."""
    level = parse_level(where)
    budget = LARGEST_BYTES if level.budget_bytes is None else level.budget_bytes
    return OffloadPlace(where, measured_link(shared_store(where, device), device), budget)


@functools.cache
def shared_store(where: str, device: torch.device) -> LenientStore:
    return LenientStore(parse_level(where).open(device))


class LenientStore:
    """A store that never refuses."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.has_failed = False

    def copy_out(self, tensor: torch.Tensor) -> Ticket:
        if self.has_failed:
            return StayedTicket(tensor)
        try:
            return self.inner.copy_out(tensor)
        except OffloadFailed as error:
            self.has_failed = True
            warnings.warn(
                f"{error} Values stay on the device for the rest of this step, beyond its budget; the next steps are "
                "planned without offloading.",
                stacklevel=2,
            )
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

    def wait_out(self) -> None:
        """There is no copy."""

    def wait_back(self) -> None:
        """There is no copy."""
