"""The storages that a dry run has made, each followed by a weak reference from its allocation to its death.

Views share their storage, so they are one. What was there before the step is known and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from remat.core.results.profile import Phase
from remat.pytorch.device import rules_of
from remat.pytorch.living_storages import LivingStorages


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


class DryRunStorages:
    def __init__(self, device: torch.device) -> None:
        self._type = device.type
        self._grain = rules_of(device).size_step_bytes
        self._living: LivingStorages[Storage | None] = LivingStorages(self._free)
        """None stands for what was there before."""
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
        self._living.add(tensor, None)

    def find(self, tensor: torch.Tensor) -> Storage | None:
        return self._living.get(tensor)

    def meet(self, tensor: torch.Tensor, phase: Phase, place: Callable[[], Place]) -> None:
        """Count its storage if it is new and takes memory of the device."""
        if tensor.device.type != self._type or tensor in self._living:
            return
        size = -(-int(tensor.untyped_storage().nbytes()) // self._grain) * self._grain
        if size:
            self._living.add(tensor, self._allocate(size, phase, place()))

    def _allocate(self, size: int, phase: Phase, place: Place) -> Storage:
        self.moment += 1
        item = Storage(size, phase, place, place, self.moment)
        self.all.append(item)
        self.live_bytes += size
        self.high_bytes = max(self.high_bytes, self.live_bytes)
        return item

    def _free(self, item: Storage | None) -> None:
        if item is not None:
            self.moment += 1
            item.freed = self.moment
            self.live_bytes -= item.size_bytes

    def events(self) -> Iterator[tuple[int, Storage]]:
        """Allocations and frees in order; each storage comes once or, if it was freed, twice."""
        pairs = [(item.allocated, item) for item in self.all]
        pairs += [(item.freed, item) for item in self.all if item.freed is not None]
        return iter(sorted(pairs, key=lambda pair: pair[0]))
