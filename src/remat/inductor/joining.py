"""What Inductor may do with memory that no kernel needs just now: join kernels, and hold what was freed.

Inductor makes one kernel of two that read the same tensor: the later is moved to the place of the earlier, and with it
what it waits for. Where backward makes an activation again, its gradient often is such a kernel, and both results are
in memory at once. And it holds a freed tensor for a later one of its size, which saves the host two calls. In: what was
predicted to be in memory when, and how much may be. Out: where there is room for either.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from remat.inductor._compat.kernels import PlannedKernel
from remat.inductor.model.choose import Choice
from remat.inductor.model.joint import Joint, Kind


@dataclass(slots=True)
class Room:
    """In one half of a step; what is taken is remembered."""

    places: Mapping[int, int]
    """Where each node of the joint graph runs, by its number."""
    live_bytes: list[int]
    """What is in memory there, with what was taken since."""
    most_bytes: int
    """What may be."""
    stages: list[int]
    """How many kernels that run alone come before each node."""
    _joined: set[tuple[int, int]] = field(default_factory=set)
    _moved: dict[int, list[tuple[int, frozenset[int]]]] = field(default_factory=dict)
    """For nodes of kernels that may be part of an earlier one: its place, and what it computes itself."""
    _known: dict[frozenset[int], int | None] = field(default_factory=dict)

    def for_one(self, one: PlannedKernel, other: PlannedKernel) -> bool:
        """Whether two kernels may be one; those that nobody foresaw may."""
        places = [(place, kernel) for kernel in (one, other) if (place := self._place(kernel)) is not None]
        if len(places) < 2:
            return True
        (first, stays), (later, moved) = sorted(places, key=lambda item: item[0])
        # Neighbours are one kernel in the prediction, too.
        if self.stages[first] == self.stages[later] or (first, later) in self._joined:
            return True
        earlier = (item for item in moved.waits_for if (self._place(item) or 0) > first)
        is_free = self._take(first, later, sum(item.made_bytes for item in (moved, *earlier)))
        if is_free:
            self._joined.add((first, later))
            for number in moved.nodes - stays.nodes:
                self._moved.setdefault(number, []).append((first, stays.nodes))
            self._known.clear()
        return is_free

    def to_hold(self, last: PlannedKernel, next_: PlannedKernel, size_bytes: int) -> bool:
        """Whether so much that `last` was the last to need may stay in memory until `next_` writes to it."""
        begin, end = self._place(last), self._place(next_)
        return begin is not None and end is not None and begin < end and self._take(begin + 1, end, size_bytes)

    def _take(self, begin: int, end: int, size_bytes: int) -> bool:
        is_free = max(self.live_bytes[begin:end], default=0) + size_bytes <= self.most_bytes
        if is_free:
            for place in range(begin, end):
                self.live_bytes[place] += size_bytes
        return is_free

    def _place(self, kernel: PlannedKernel) -> int | None:
        """Where the last of what a kernel computes stands; a part that was moved to another is where that is."""
        if kernel.nodes not in self._known:
            found = (self._place_in(kernel, number) for number in kernel.nodes if number in self.places)
            self._known[kernel.nodes] = max(found, default=None)
        return self._known[kernel.nodes]

    def _place_in(self, kernel: PlannedKernel, number: int) -> int:
        moved = (place for place, others in self._moved.get(number, ()) if others & kernel.nodes)
        return min(moved, default=self.places[number])


@dataclass(frozen=True, slots=True)
class Rooms:
    forward: Room
    backward: Room

    def of(self, *, is_backward: bool) -> Room:
        return self.backward if is_backward else self.forward


def rooms_of(joint: Joint, choice: Choice, most_bytes: int) -> Rooms:
    """What is in memory may grow to `most_bytes`, or to the peak that is predicted."""
    prediction, joint = choice.prediction, joint if choice.unrolled is None else choice.unrolled.joint
    most = max(most_bytes, prediction.peak_bytes)
    halves = []
    for in_backward in (False, True):
        moments = [moment for moment in prediction.moments if moment.in_backward is in_backward]
        places = {moment.node: place for place, moment in enumerate(moments)}
        alone = (joint.nodes[moment.node].kind is Kind.ALONE for moment in moments)
        stages = list(itertools.accumulate(alone, initial=0))
        halves.append(Room(places, [moment.live_bytes for moment in moments], most, stages))
    return Rooms(*halves)
