"""The state of the exact search, what follows from it, and where to branch.

Every section has a floor, below which everything is decided, and a slack: how much of it may still be wasted before its
unplaced buffers no longer fit below the capacity. A *valley* is a stretch of equal floors between higher ones. In a
placement where nothing can sink any lower, the next buffer of a valley's section either lies on that floor, and then
within the valley, or it rests on something else, and the floor rises to the lowest thing it can rest on. So a section
has few ways to go on, none of them found twice, and the section with the fewest is the one to branch on.

The idea of searching such canonical placements with floors and slacks is MiniMalloc's (Moffitt, ASPLOS 2023), which
places buffers in the order of their offsets instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat.layout.packing.grid import Grid, Mask, members

_NEVER = 1 << 62


@dataclass(slots=True)
class State:
    """Unplaced buffers that hang together, over the sections from `start`."""

    unplaced: Mask
    floor: list[int]
    slack: list[int]
    start: int

    def key(self) -> tuple[Mask, tuple[int, ...]]:
        """What decides whether it can be completed: slack and start follow from these."""
        return self.unplaced, tuple(self.floor)


class Spot(NamedTuple):
    """A section `at` of the valley from `left` to `right`, and the buffers that may lie on its floor."""

    at: int
    left: int
    right: int
    height: int
    candidates: Mask


Rank = Callable[[tuple[int, int, int, int, bool]], object]
"""Which spot to branch on: the smallest rank of (ways to go on, height, slack, width of the valley, has slack)."""


def root(grid: Grid, capacity: int) -> State:
    return State(grid.everything, [0] * len(grid.load), [capacity - load for load in grid.load], 0)


def place(grid: Grid, state: State, number: int, height: int) -> State:
    """The state after buffer `number` is laid on a floor of `height`."""
    left, right = grid.first[number] - state.start, grid.end[number] - state.start
    floor = state.floor[:]
    floor[left:right] = [height + grid.size[number]] * (right - left)
    return State(state.unplaced & ~(1 << number), floor, state.slack, state.start)


def raised(state: State, at: int, height: int) -> State | None:
    """The state after the floor of one section rises to `height`; None if that wastes too much."""
    slack = state.slack[at] - (height - state.floor[at])
    if slack < 0:
        return None
    result = State(state.unplaced, state.floor[:], state.slack[:], state.start)
    result.floor[at], result.slack[at] = height, slack
    return result


def split(grid: Grid, state: State) -> list[State]:
    """The parts of `state` that have no unplaced buffer in common; the smallest first, as it fails soonest."""
    unplaced, start = state.unplaced, state.start
    parts, left = [], 0
    for at in range(len(state.floor)):
        if grid.crossing[start + at] & unplaced and at + 1 < len(state.floor):
            continue
        own = unplaced & grid.from_[start + left] & grid.until[start + at + 1]
        if own:
            parts.append(State(own, state.floor[left : at + 1], state.slack[left : at + 1], start + left))
        left = at + 1
    if len(parts) > 1:
        parts.sort(key=lambda part: len(part.floor))
    return parts


def valleys(floor: list[int]) -> Iterator[tuple[int, int]]:
    """The stretches of equal floors whose neighbours on both sides are higher."""
    left, count = 0, len(floor)
    falls = True
    while left < count:
        height, right = floor[left], left + 1
        while right < count and floor[right] == height:
            right += 1
        rises = right == count or floor[right] > height
        if falls and rises:
            yield left, right
        falls = not rises
        left = right


def settle(grid: Grid, state: State, rank: Rank) -> Spot | None:
    """Raise every floor that must rise, then choose where to branch; None if the state cannot be completed."""
    state.floor, state.slack = state.floor[:], state.slack[:]
    while True:
        best: tuple[Any, Spot] | None = None
        for left, right in valleys(state.floor):
            found = _best_spot(grid, state, left, right, rank)
            if found is None:
                break
            if best is None or found[0] < best[0]:
                best = found
        else:
            return best[1] if best is not None else None
        if min(state.slack) < 0:
            return None


def _best_spot(grid: Grid, state: State, left: int, right: int, rank: Rank) -> tuple[Any, Spot] | None:
    """The spot of the smallest rank in a valley; None if floors had to be raised instead."""
    start, slack, height = state.start, state.slack, state.floor[left]
    inside = state.unplaced & grid.from_[start + left] & grid.until[start + right]
    if inside and grid.has_alignment:
        inside = _aligned(grid, inside, height)
    width, chosen, least = right - left, -1, None
    for at in range(left, right):
        ways = (inside & grid.covering[start + at]).bit_count()
        if not ways:
            _raise(state, at, floor_above(grid, state, left, right, at))
            return None
        value: Any = rank((ways + (slack[at] > 0), height, slack[at], width, slack[at] > 0))
        if least is None or value < least:
            chosen, least = at, value
    return least, Spot(chosen, left, right, height, inside & grid.covering[start + chosen])


def _raise(state: State, at: int, height: int) -> None:
    state.slack[at] -= height - state.floor[at]
    state.floor[at] = height


def _aligned(grid: Grid, candidates: Mask, height: int) -> Mask:
    """Those of `candidates` that may lie at `height`."""
    return sum(1 << number for number in members(candidates) if height % grid.alignment[number] == 0)


def floor_above(grid: Grid, state: State, left: int, right: int, at: int) -> int:
    """The lowest offset of a buffer that covers section `at` but does not lie on its valley's floor."""
    start, height = state.start, state.floor[at]
    covering = state.unplaced & grid.covering[start + at]
    lowest, rests_on_others = _NEVER, False
    for number in members(covering):
        bottom = _bottom(grid, state, number)
        if bottom > height:
            lowest = min(lowest, bottom)
        else:
            rests_on_others = True
    if rests_on_others:
        # What a buffer of this valley rests on meets the valley, but not this section, where the buffer is the lowest.
        others = 0
        for section in range(start + left, start + right):
            others |= grid.covering[section]
        for number in members(others & state.unplaced & ~covering):
            lowest = min(lowest, _bottom(grid, state, number) + grid.size[number])
    return lowest


def _bottom(grid: Grid, state: State, number: int) -> int:
    """The lowest offset that the floors leave to a buffer."""
    floor = max(state.floor[grid.first[number] - state.start : grid.end[number] - state.start])
    alignment = grid.alignment[number]
    return floor if alignment == 1 else -(-floor // alignment) * alignment
