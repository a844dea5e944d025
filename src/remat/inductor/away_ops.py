"""Ops that move a saved tensor to the host and back inside compiled code.

    handle = remat::send(x, where)         begins the copy out
    handle = remat::sent(x, handle)        what is computed later may use the memory of x, which lives until here
    y = remat::fetch(handle, …)            begins the copy back, into new memory
    remat::fetched(y!, handle)             what is computed later may read y: it claims to change it, so that all who
                                           read y come after

A handle is a CPU tensor of one element, which carries the ticket of a store (`pytorch/host/store.py`) as an attribute:
who drops the handle releases the copy. To Inductor these are ops that it calls in their turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat.pytorch.host.shared import StayedTicket, shared_store

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("send(Tensor source, str where) -> Tensor")
_library.define("sent(Tensor source, Tensor handle) -> Tensor")
_library.define(
    "fetch(Tensor handle, str where, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) -> Tensor"
)
_library.define("fetched(Tensor(a!) target, Tensor handle) -> ()")


def _handle(ticket: Any) -> Tensor:
    made = torch.empty(1, dtype=torch.int64)
    made.remat_ticket = ticket
    return made


def _send(source: Tensor, where: str) -> Tensor:
    return _handle(shared_store(where, source.device).copy_out(source))


def _sent(source: Tensor, handle: Tensor) -> Tensor:
    ticket: Any = handle.remat_ticket
    ticket.wait_out()
    # Compiled code writes into the memory of what it takes to be gone.
    return _handle(ticket.elsewhere() if isinstance(ticket, StayedTicket) else ticket)


def _fetch(
    handle: Tensor, where: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    ticket: Any = handle.remat_ticket
    if isinstance(ticket, StayedTicket):
        # As above, and backward may run twice.
        ticket = ticket.elsewhere()
    found = shared_store(where, device).copy_back(ticket)
    if found.stride() == tuple(stride) and found.dtype is dtype:
        return found
    # Right before fast: the code was compiled for another layout.
    ticket.wait_back()
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(found)


def _fetched(target: Tensor, handle: Tensor) -> None:
    ticket: Any = handle.remat_ticket
    ticket.wait_back()


for _name, _function in (("send", _send), ("sent", _sent), ("fetch", _fetch), ("fetched", _fetched)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("remat::send", lib=_library)
def _fake_send(source: Tensor, where: str) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.register_fake("remat::sent", lib=_library)
def _fake_sent(source: Tensor, handle: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64)


@torch.library.register_fake("remat::fetch", lib=_library)
def _fake_fetch(
    handle: Tensor, where: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@torch.library.register_fake("remat::fetched", lib=_library)
def _fake_fetched(target: Tensor, handle: Tensor) -> None:
    return None


send, sent = torch.ops.remat.send.default, torch.ops.remat.sent.default
fetch, fetched = torch.ops.remat.fetch.default, torch.ops.remat.fetched.default
