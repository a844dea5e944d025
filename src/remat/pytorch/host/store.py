"""Tensors on the host: copied out, copied back, let go.

    ticket = store.copy_out(tensor)     begins; the ticket holds the tensor
    ticket.wait_out()                   what is computed from now on may use the tensor's memory
    tensor = store.copy_back(ticket)    begins; the ticket holds the tensor
    ticket.wait_back()                  what is computed from now on may read the tensor
    store.release(ticket)               the host's bytes may be used again

What stays away for long is written anew with `copy_over`, and looked at where it lies with `peek`.

None of these makes the host wait for the device. Memory of the device is allocated and freed on the compute stream
alone, and every copy begins after what that stream was given so far. It has waited for a copy before the ticket lets go
of what was copied, on either side: the order of that stream is the order of all uses. A ticket that is dropped releases
itself. Shape, strides and bits come back as they were; of a tensor with gaps the whole span is copied, of an expanded
one what is there once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import torch

from remat.pytorch.host.engines import Engines, Moment, engines_of
from remat.pytorch.host.memory import HostMemory
from remat.pytorch.host.space import Range


class Ticket(Protocol):
    """A tensor that is elsewhere."""

    def wait_out(self) -> None: ...

    def wait_back(self) -> None: ...


class Store(Protocol):
    """A level below the device's memory; raises `OffloadFailed` where it cannot take or give back a tensor."""

    def copy_out(self, tensor: torch.Tensor) -> Ticket: ...

    def copy_back(self, ticket: Ticket) -> torch.Tensor: ...

    def release(self, ticket: Ticket) -> None: ...

    @property
    def used_bytes(self) -> int:
        """What is taken by tickets that were not released."""


class LastingTicket(Ticket, Protocol):
    """A tensor that is elsewhere for long."""

    like: Strided


class LastingStore(Store, Protocol):
    """A store for tensors that stay away from step to step."""

    def copy_out(self, tensor: torch.Tensor) -> LastingTicket: ...

    def copy_over(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Copy out again, to where the ticket's tensor lies; the two must be alike."""

    def peek(self, ticket: Ticket) -> torch.Tensor:
        """The tensor on the host, which waits for copies that are under way; of host memory, as it lies there."""


@dataclass(frozen=True, slots=True)
class Strided:
    """What a tensor is like, and the memory from its first element to its last."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def count(self) -> int:
        """Elements from its first to its last in memory, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def size_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like this, as it lies in memory."""
        return tensor.as_strided((self.count,), (1,), tensor.storage_offset())

    def empty(self, device: torch.device) -> torch.Tensor:
        """New memory for one."""
        return torch.empty(self.count, dtype=self.dtype, device=device)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.stride)


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """With its values in memory as they are: signs and conjugates can be left for later."""
    return tensor.detach().resolve_conj().resolve_neg()


class HostStore:
    """Pinned host memory as a `Store`."""

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self._engines: Engines = engines_of(device)
        self._memory = HostMemory(device, budget_bytes)

    @property
    def used_bytes(self) -> int:
        return self._memory.used_bytes

    @property
    def total_bytes(self) -> int:
        """What was taken from the system; it stays for the next step."""
        return self._memory.total_bytes

    def copy_out(self, tensor: torch.Tensor) -> HostTicket:
        tensor = as_stored(tensor)
        like = Strided.of(tensor)
        ticket = HostTicket(self, like, self._memory.take(like.size_bytes))
        self.copy_over(ticket, tensor)
        return ticket

    def copy_over(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        found = _own(ticket)
        found.wait()
        source = found.like.flat(as_stored(tensor))
        found.out(source, self._engines.send(source, self._lies(found)))

    def copy_back(self, ticket: Ticket) -> torch.Tensor:
        found = _own(ticket)
        target = found.like.empty(self._engines.device)
        found.back(target, self._engines.fetch(self._lies(found), target, self._engines.now(), found.copied))
        return found.like.shaped(target)

    def peek(self, ticket: Ticket) -> torch.Tensor:
        found = _own(ticket)
        self._engines.finish(found.copied)
        return found.like.shaped(self._lies(found))

    def release(self, ticket: Ticket) -> None:
        found = _own(ticket)
        found.wait()
        place, found.place = found.place, None
        if place is not None:
            self._memory.give_back(place)

    def wait(self, moment: Moment) -> None:
        self._engines.wait(moment)

    def _lies(self, ticket: HostTicket) -> torch.Tensor:
        assert ticket.place is not None, "the ticket was not released"
        return self._memory.tensor(ticket.place, ticket.like.dtype, ticket.like.count)


class HostTicket:
    """Where a tensor lies on the host, and what its copies still hold of the device's memory."""

    __slots__ = ("_fetched", "_source", "_store", "_target", "copied", "like", "place")

    def __init__(self, store: HostStore, like: Strided, place: Range) -> None:
        self.place: Range | None = place
        self.like = like
        self.copied: Moment = None
        self._fetched: Moment = None
        self._store = store
        self._source: torch.Tensor | None = None
        self._target: torch.Tensor | None = None

    def wait_out(self) -> None:
        if self._source is not None:
            self._store.wait(self.copied)
            self._source = None

    def wait_back(self) -> None:
        if self._target is not None:
            self._store.wait(self._fetched)
            self._target = None

    def wait(self) -> None:
        self.wait_out()
        self.wait_back()

    def out(self, source: torch.Tensor, copied: Moment) -> None:
        """A copy out has begun."""
        self._source, self.copied = source, copied

    def back(self, target: torch.Tensor, fetched: Moment) -> None:
        """A copy back has begun; one that was not waited for yet is."""
        self.wait_back()
        self._target, self._fetched = target, fetched

    def __del__(self) -> None:
        if self.place is not None:
            self._store.release(self)


def _own(ticket: Ticket) -> HostTicket:
    assert isinstance(ticket, HostTicket), "a ticket of this store"
    return ticket
