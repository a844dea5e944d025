"""What CUDA's caching allocator hands out for a schedule: a little more than was asked for.

The allocator counts whole blocks. A request for more than 1 MiB may get a free block that is up to 1 MiB larger and
is not worth splitting, and `max_memory_allocated` counts all of it. This file plays the allocator's rules (sizes in
multiples of 512 bytes, best fit, segments of 2 MiB, 20 MiB or rounded to 2 MiB, splitting, merging) over the
allocations of a schedule, step after step, and tells the peak once the pattern repeats.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import NO_VALUE, Timeline, simulate

GRAIN = 512
SMALL = 1 << 20
"""Requests up to this come from segments of `SMALL_SEGMENT`; the rest of a larger block is split off above it."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
LARGE_REQUEST = 10 << 20
"""Requests from here on get a segment of their own, rounded up to `ROUNDING`."""
ROUNDING = 2 << 20
HISTORY, HISTORY_PER_REQUEST, MOST_HISTORY = 2 << 20, 16 << 10, 8 << 20
"""Added where anything larger than `SMALL` is asked for, more for many such requests: which larger blocks they get
depends on what the process did before. Smaller requests get what they ask for, whatever the pool looks like.
"""
ROUNDS = 3
"""Steps played: in the first the segments are made, later ones reuse them."""


@dataclass(eq=False, slots=True)
class PoolBlock:
    address: int
    size: int
    small: bool
    free: bool = True
    before: PoolBlock | None = None
    after: PoolBlock | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Blocks as the allocator keeps them; `allocated` counts as `memory_allocated` does."""

    allocated: int = 0
    peak: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, PoolBlock] = field(default_factory=dict)
    _end: int = 0

    def allocate(self, size: int) -> PoolBlock:
        size = max(GRAIN, -(-size // GRAIN) * GRAIN)
        block = self._best_fit(size) or self._new_segment(size)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def release(self, block: PoolBlock) -> None:
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                self._merge(block, other)
        block.free = True
        self._put(block)

    def _best_fit(self, size: int) -> PoolBlock | None:
        free = self._free[size <= SMALL]
        place = bisect.bisect_left(free, (size, -1))
        if place == len(free):
            return None
        _, address = free.pop(place)
        return self._blocks[address]

    def _new_segment(self, size: int) -> PoolBlock:
        if size <= SMALL:
            length = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            length = LARGE_SEGMENT
        else:
            length = -(-size // ROUNDING) * ROUNDING
        block = PoolBlock(self._end, length, size <= SMALL)
        self._end += length
        self._blocks[block.address] = block
        return block

    def _split(self, block: PoolBlock, size: int) -> None:
        rest = block.size - size
        if rest < GRAIN if block.small else rest <= SMALL:
            return
        other = PoolBlock(block.address + size, rest, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = other
        block.after, block.size = other, size
        self._blocks[other.address] = other
        self._put(other)

    def _merge(self, block: PoolBlock, other: PoolBlock) -> None:
        """Take the free neighbour `other` into `block`."""
        del self._blocks[other.address]
        if other is block.before:
            del self._blocks[block.address]
            block.address, block.before = other.address, other.before
            self._blocks[block.address] = block
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    def _put(self, block: PoolBlock) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address))

    def _take(self, block: PoolBlock) -> None:
        free = self._free[block.small]
        del free[bisect.bisect_left(free, (block.size, block.address))]


def allocator_slack_bytes(problem: Problem, schedule: Schedule) -> int:
    """How far the allocator's peak exceeds the sum of live bytes."""
    timeline = simulate(problem, schedule)
    allocator = CachingAllocator()
    worst = 0
    for _ in range(ROUNDS):
        allocator.peak = allocator.allocated
        _play(problem, schedule, timeline, allocator)
        worst = max(worst, allocator.peak)
    return max(0, problem.resident_bytes + worst - timeline.peak_bytes) + history_bytes(requests(problem))


def requests(problem: Problem) -> Iterator[int]:
    """What every schedule asks the allocator for at least once."""
    yield from problem.costs.workspace_bytes
    for op in problem.graph.ops:
        yield from (problem.costs.size_bytes[value] for value in op.outputs)


def history_bytes(sizes: Iterable[int]) -> int:
    """What requests of these sizes may get beyond what they get in a fresh process."""
    large = sum(size > SMALL for size in sizes)
    return min(HISTORY + large * HISTORY_PER_REQUEST, MOST_HISTORY) if large else 0


def slack_of_events(events: Sequence[tuple[int, int, bool]]) -> int:
    """The same for allocations and frees in their order: (key of the storage, bytes, whether it is freed).

    What is not freed stays to the end of the step.
    """
    allocator = CachingAllocator()
    worst = 0
    for _ in range(ROUNDS):
        allocator.peak = allocator.allocated
        _play_events(events, allocator)
        worst = max(worst, allocator.peak)
    current = peak = 0
    for _, size, is_free in events:
        current += -size if is_free else size
        peak = max(peak, current)
    return max(0, worst - peak) + history_bytes(size for _, size, is_free in events if not is_free)


def _play_events(events: Sequence[tuple[int, int, bool]], allocator: CachingAllocator) -> None:
    blocks: dict[int, PoolBlock] = {}
    for key, size, is_free in events:
        if is_free:
            allocator.release(blocks.pop(key))
        else:
            blocks[key] = allocator.allocate(size)
    for block in blocks.values():
        allocator.release(block)


def _play(problem: Problem, schedule: Schedule, timeline: Timeline, allocator: CachingAllocator) -> None:
    """One step: outputs and workspace are allocated, what is used for the last time is released, all at the end.

    An output that is written into an input takes over its block.
    """
    ops, sizes, workspace = problem.graph.ops, problem.costs.size_bytes, problem.costs.workspace_bytes
    held: dict[int, PoolBlock] = {}
    dying: dict[int, list[int]] = {}
    for step, number in enumerate(schedule.steps):
        taken = timeline.overwritten[step]
        for value, end in zip(ops[number].outputs, timeline.last_uses[step], strict=True):
            if sizes[value]:
                held[value] = held.pop(taken) if taken != NO_VALUE else allocator.allocate(sizes[value])
                dying.setdefault(end, []).append(value)
        if workspace[number] > 0:
            allocator.release(allocator.allocate(workspace[number]))
        for gone in dying.pop(step, ()):
            if gone != taken:
                allocator.release(held.pop(gone))
