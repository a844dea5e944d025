"""The storages that a dry run has made, each followed by a weak reference from its allocation to its death.

Views share their storage, so they are one. What was there before the step is known and costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from remat.core.profile import Phase
from remat.pytorch.allocator import GRAIN


@dataclass(frozen=True, slots=True)
class Place:
    """A variable of a wrapper."""

    file: str
    function: str
    name: str


@dataclass(eq=False, slots=True)
class Storage:
    """One allocation; `freed` stays None while it is in memory. Moments count allocations and frees."""

    size_bytes: int
    phase: Phase
    born: Place
    held: Place
    """Where the wrapper that was given it keeps it."""
    allocated: int
    freed: int | None = None


class Storages:
    def __init__(self, device: torch.device) -> None:
        self._type = device.type
        self._grain = GRAIN if device.type == "cuda" else 1
        self._known: dict[int, tuple[Storage | None, Any]] = {}
        """By the storage's address in C++, with the weak reference that must outlive it."""
        self.all: list[Storage] = []
        self.live_bytes = 0
        self.high_bytes = 0
        """The most since `take_high`."""
        self.moment = 0

    def take_high(self) -> int:
        high, self.high_bytes = max(self.high_bytes, self.live_bytes), 0
        return high

    def forgive(self, tensor: torch.Tensor) -> None:
        """It was there before."""
        self._follow(tensor.untyped_storage(), None)

    def find(self, tensor: torch.Tensor) -> Storage | None:
        known = self._known.get(int(tensor.untyped_storage()._cdata))
        return known[0] if known else None

    def meet(self, tensor: torch.Tensor, phase: Phase, place: Callable[[], Place]) -> None:
        """Count its storage if it is new and takes memory of the device."""
        storage = tensor.untyped_storage()
        if tensor.device.type != self._type or int(storage._cdata) in self._known:
            return
        size = -(-int(storage.nbytes()) // self._grain) * self._grain
        if size:
            self._add(storage, size, phase, place())

    def _add(self, storage: Any, size: int, phase: Phase, place: Place) -> None:
        self.moment += 1
        item = Storage(size, phase, place, place, self.moment)
        self.all.append(item)
        self.live_bytes += size
        self.high_bytes = max(self.high_bytes, self.live_bytes)
        self._follow(storage, item)

    def _follow(self, storage: Any, item: Storage | None) -> None:
        key = int(storage._cdata)
        self._known[key] = item, weakref.ref(storage, lambda _: self._forget(key, item))

    def _forget(self, key: int, item: Storage | None) -> None:
        del self._known[key]
        if item is not None:
            self.moment += 1
            item.freed = self.moment
            self.live_bytes -= item.size_bytes

    def events(self) -> Iterator[tuple[int, Storage]]:
        """Allocations and frees in order; each storage comes once or, if it was freed, twice."""
        pairs = [(item.allocated, item) for item in self.all]
        pairs += [(item.freed, item) for item in self.all if item.freed is not None]
        return iter(sorted(pairs, key=lambda pair: pair[0]))
