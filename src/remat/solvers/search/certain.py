"""Schedules that need no search: forward is cut into stretches, and only what crosses the cuts is kept.

In: a problem. Out: schedules, those that compute least again first, each made in time that grows as the graph does and
none by the clock: what is found on a busy machine is what is found on an idle one. As with √n checkpointing (Chen et
al. 2016), backward computes one stretch again at a time; where that is too much, a stretch is cut in turn, as deep as
`LEVELS`. Cuts are where little crosses. A step of a recurrence is a place like any other: no blocks have to be known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import unhurried
from remat.core.simulate import simulate
from remat.solvers.schedule.editable import FlatProblem, flatten
from remat.solvers.schedule.keep import dropping_schedule, turning_point

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Of what forward leaves for backward, the part from its beginning on that is computed again."""
LEVELS = (2, 3)
"""How deep stretches are cut, where all of forward is computed again."""
LITTLE = 0.1
"""Which share of the places of forward have less crossing than a cut is taken to have."""
NEAR = 0.5
"""Of the length of a stretch, how far a cut may move to where less crosses."""


def certain_schedule(problem: Problem) -> Schedule:
    """The first of `certain_schedules` that fits, else the one with the smallest peak; no deadline ends it."""
    best: tuple[int, Schedule] | None = None
    with unhurried():
        for schedule in certain_schedules(problem):
            peak = simulate(problem, schedule).peak_bytes
            if best is None or peak < best[0]:
                best = peak, schedule
            if peak <= problem.budget_bytes:
                break
    assert best is not None, "there is at least one"
    return best[1]


def certain_schedules(problem: Problem) -> Iterator[Schedule]:
    """See the module's docstring."""
    forward = _Forward(problem)
    for share in SHARES:
        yield forward.schedule(share, 1)
    for levels in LEVELS:
        yield forward.schedule(1.0, levels)


class _Forward:
    def __init__(self, problem: Problem) -> None:
        flat = self.flat = flatten(problem)
        turn = self.turn = turning_point(problem)
        self.last_readers = {value: number for number in range(turn) for value in flat.inputs[number]}
        """For each value, the last op of forward that reads it."""
        later = range(flat.count - 1, turn - 1, -1)
        self.first_reader = {value: stage for stage in later for value in flat.inputs[stage]}
        """For each value, the first op from the turn on that reads it."""
        self.crossing = crossing_bytes(flat, turn, self.last_readers)
        read = self.first_reader
        made = [sum(flat.size[value] for value in flat.outputs[number] if value in read) for number in range(turn)]
        self.behind = np.concatenate(([0], np.cumsum(made, dtype=np.int64)))
        """For each op of forward, the bytes that ops before it make for backward."""

    def schedule(self, share: float, levels: int) -> Schedule:
        """Keep what the last part of forward makes, and cut the rest into stretches of stretches."""
        end = int(np.searchsorted(self.behind, share * self.behind[-1])) if share < 1 else self.turn
        count = self._stretches(int(self.behind[end]), levels)
        drops: dict[int, list[int]] = {}
        # What is gone of each stretch, and the op at which it goes.
        stretches = [(0, end, self._made(0, end), self.turn)]
        for _ in range(levels):
            cuts = [[start, *self._cut(start, stop, count), stop] for start, stop, _, _ in stretches]
            kept = crossing_values(self.flat, sorted({place for places in cuts for place in places}), self.last_readers)
            for _, _, made, stage in stretches:
                drops.setdefault(stage, []).extend(value for value in made if value not in kept)
            pairs = [pair for places in cuts for pair in pairwise(places)]
            stretches = [self._computed_again(start, stop, kept) for start, stop in pairs]
        return dropping_schedule(self.flat, drops)

    def _made(self, start: int, stop: int) -> list[int]:
        return [value for number in range(start, stop) for value in self.flat.outputs[number]]

    def _computed_again(self, start: int, stop: int, kept: set[int]) -> tuple[int, int, list[int], int]:
        """A stretch, what has to be computed again in it, and the op after the first that needs that."""
        made = [value for value in self._made(start, stop) if value not in kept]
        first = min((self.first_reader.get(value, self.flat.count) for value in made), default=self.flat.count)
        return start, stop, made, first + 1

    def _stretches(self, left_bytes: int, levels: int) -> int:
        """Into how many parts to cut at each level, so that checkpoints take as much as the last stretches do."""
        crossing = self.crossing[1 : self.turn]
        crossing = crossing[crossing > 0]
        usual = max(1, int(np.quantile(crossing, LITTLE))) if crossing.size else left_bytes
        return max(2, round(math.pow(left_bytes / usual, 1 / (levels + 1))))

    def _cut(self, start: int, stop: int, count: int) -> Iterator[int]:
        """Places between two ops, with about as many bytes between any two of them."""
        first, last, count = self.behind[start], self.behind[stop], min(count, stop - start)
        for part in range(1, count):
            near = [first + (last - first) * (part + shift) / count for shift in (-NEAR / 2, NEAR / 2)]
            low, high = (int(np.searchsorted(self.behind, amount)) for amount in near)
            low, high = max(low, start + 1), min(high, stop - 1)
            if low <= high:
                yield low + int(self.crossing[low : high + 1].argmin())


def crossing_values(flat: FlatProblem, places: Sequence[int], last_readers: Mapping[int, int]) -> set[int]:
    """Values that are made before one of the places, which are in order, and read after it, in forward."""
    found = set()
    for value, last in last_readers.items():
        # The first place after the value is made.
        position = bisect_right(places, flat.producer[value])
        if position < len(places) and places[position] <= last:
            found.add(value)
    return found


def crossing_bytes(flat: FlatProblem, turn: int, last_readers: Mapping[int, int]) -> NDArray[np.int64]:
    """For each op of forward, the bytes that ops before it make and it or later ones of forward read."""
    change = np.zeros(turn + 1, dtype=np.int64)
    for value, last in last_readers.items():
        change[flat.producer[value] + 1] += flat.size[value]
        change[last + 1] -= flat.size[value]
    return change.cumsum()
