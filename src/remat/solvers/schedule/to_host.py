"""A schedule that needs too much memory, made to fit by copies to the host.

In: a problem with copies (`core/copies.py`), and a schedule of it that uses none and may exceed the budget. Out: one
within the budget; None where copies alone cannot do it. Wherever the schedule exceeds the budget, from its start on,
the value leaves that is not read for longest, of those whose copy out can be done by then. Copies come back just in
time. Where that is not enough, ops wait: for a copy out that they need done, or for one that comes back only when it is
read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from remat.core.copies import Copies, copies_of, movable_of
from remat.core.graph import OpId, ValueId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate


@dataclass(frozen=True, slots=True)
class Stay:
    """A value between two of its reads in a schedule; all places are those of steps."""

    value: ValueId
    size_bytes: int
    birth: int
    last: int
    """The read before, or the birth."""
    following: int
    """The read after."""


@dataclass(frozen=True, slots=True)
class Trip:
    """A stay on the host: the value is dropped when step `gone` has run, and is back in memory from step `back` on."""

    stay: Stay
    gone: int
    back: int

    def covers(self, step: int) -> bool:
        return self.gone < step < self.back


def fit_by_copies(problem: Problem, schedule: Schedule) -> Schedule | None:
    """See the module's docstring."""
    fitting = _Fitting(problem, schedule)
    return with_trips(problem, schedule, fitting.trips()) if fitting.fits() else None


def trips_without_waiting(
    problem: Problem,
    schedule: Schedule,
    values: Collection[int] | None = None,
    worth: Mapping[int, float] | None = None,
) -> list[Trip]:
    """Copies, of these values alone if they are given, that no op waits for: they may not be enough to fit.

    Where it is told what values are worth, those of most worth leave first, whenever they are read.
    """
    fitting = _Fitting(problem, schedule, values, worth)
    fitting.fits(may_wait=False)
    return fitting.trips()


class _Fitting:
    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        values: Collection[int] | None = None,
        worth: Mapping[int, float] | None = None,
    ) -> None:
        self._worth = worth or {}
        self._budget, self._host = problem.budget_bytes, problem.host_budget_bytes
        self._times = {item.value: item for item in movable_of(problem)}
        self._live = np.array(simulate(problem, schedule).live_bytes, dtype=np.int64)
        self._ends = list(accumulate(problem.costs.time_ns[number] for number in schedule.steps))
        self._left = {stay.value: stay for stay in stays(problem, schedule) if stay.value in self._times}
        if values is not None:
            self._left = {value: stay for value, stay in self._left.items() if value in values}
        self._chosen: list[Stay] = []
        self._births: list[int] = []
        self._dones: list[float] = []
        """Of their copies out, in order."""
        self._gone_by: dict[int, int] = {}
        """For some values, the step after which they are gone whether or not their copies are done by themselves."""
        self._late: set[int] = set()
        """Values that come back only when they are read."""

    def fits(self, *, may_wait: bool = True) -> bool:
        """Choose values until everything fits, if it can be."""
        settled = -1
        while True:
            over = np.flatnonzero(self._within(self.trips()) > self._budget)
            over = over[over > settled]
            if not len(over):
                return settled < 0
            step = int(over[0])
            if not self._add(step, may_wait=may_wait) and not (may_wait and self._wait(self.trips(), step)):
                if may_wait:
                    return False
                # Nothing more can be done there.
                settled = step

    def _within(self, trips: list[Trip]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Bytes in memory while each step runs."""
        change = np.zeros(len(self._live) + 1, dtype=np.int64)
        for trip in trips:
            change[trip.gone + 1] += trip.stay.size_bytes
            change[max(trip.gone + 1, trip.back)] -= trip.stay.size_bytes
        return self._live - np.cumsum(change)[:-1]

    def _add(self, step: int, *, may_wait: bool) -> bool:
        """Choose one more value that is not read at `step`, if there is any."""
        used = sum(stay.size_bytes for stay in self._chosen)
        covering = [
            stay
            for stay in self._left.values()
            if stay.last < step < stay.following and used + stay.size_bytes <= self._host
        ]
        if not covering:
            return False
        ready = [stay for stay in covering if self._done(stay) <= self._ends[step - 1]]
        if not ready and not may_wait:
            return False
        best = max(ready or covering, key=self._rank)
        self._chosen.append(self._left.pop(best.value))
        if not ready:
            self._gone_by[best.value] = step - 1
        return True

    def _rank(self, stay: Stay) -> tuple[float, int, int, int]:
        return self._worth.get(stay.value, 0.0), stay.following, stay.size_bytes, -stay.value

    def _wait(self, trips: list[Trip], step: int) -> bool:
        """Let ops wait for a value that could be away at `step`, if there is any."""
        idle = [trip for trip in trips if trip.stay.last < step < trip.stay.following and not trip.covers(step)]
        for trip in sorted(idle, key=lambda trip: (-trip.stay.size_bytes, trip.stay.value)):
            if trip.gone >= step:
                self._gone_by[trip.stay.value] = step - 1
                return True
            if trip.stay.value not in self._late:
                self._late.add(trip.stay.value)
                return True
        return False

    def _done(self, stay: Stay) -> float:
        """When its copy out would be done beside those of the values that were chosen."""
        place = bisect_left(self._births, stay.birth)
        return self._out_after(self._dones[place - 1] if place else 0.0, stay)

    def _out_after(self, free_ns: float, stay: Stay) -> float:
        return max(free_ns, self._ends[stay.birth]) + self._times[stay.value].out_ns

    def _follow_copies_out(self) -> dict[int, float]:
        """When each copy out is done; they go in the order in which values are made."""
        in_order = sorted(self._chosen, key=lambda stay: (stay.birth, stay.value))
        self._births = [stay.birth for stay in in_order]
        self._dones = list(accumulate(in_order, self._out_after, initial=0.0))[1:]
        return {stay.value: done for stay, done in zip(in_order, self._dones, strict=True)}

    def trips(self) -> list[Trip]:
        """Of the values chosen so far."""
        done, backs = self._follow_copies_out(), self._backs()
        trips = []
        for stay in self._chosen:
            gone = max(stay.last, bisect_left(self._ends, done[stay.value]))
            gone = min(gone, self._gone_by.get(stay.value, gone), stay.following - 1)
            trips.append(Trip(stay, gone, backs[stay.value]))
        return [trip for trip in trips if trip.gone < trip.back]

    def _backs(self) -> dict[int, int]:
        """The step before which each copy back begins; they come in the order in which they are read."""
        due = self._ends[-1]
        found: dict[int, int] = {}
        for stay in sorted(self._chosen, key=lambda stay: (-stay.following, -stay.value)):
            due = min(due, self._ends[stay.following - 1]) - self._times[stay.value].back_ns
            # The last step that starts by then.
            in_time = min(stay.following, max(stay.last + 1, bisect_right(self._ends, due)))
            found[stay.value] = stay.following if stay.value in self._late else in_time
        return found


def stays(problem: Problem, schedule: Schedule) -> list[Stay]:
    """For each value that is computed once and not returned, the longest time in which nobody reads it."""
    graph, sizes = problem.graph, problem.costs.size_bytes
    uses: defaultdict[int, list[int]] = defaultdict(list)
    births: defaultdict[int, list[int]] = defaultdict(list)
    for step, number in enumerate(schedule.steps):
        for value in graph.ops[number].inputs:
            uses[value].append(step)
        for value in graph.ops[number].outputs:
            births[value].append(step)
    found = []
    for born, made in births.items():
        value = ValueId(born)
        if len(made) > 1 or value in graph.outputs or not sizes[value] or not uses[value]:
            continue
        places = [made[0], *uses[value]]
        last, following = max(zip(places, places[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        if following - last > 1:
            found.append(Stay(value, sizes[value], made[0], last, following))
    return found


def with_trips(problem: Problem, schedule: Schedule, trips: list[Trip]) -> Schedule:
    """The schedule with the ops that begin and await these copies."""
    ops: dict[ValueId, Copies] = copies_of(problem.graph)
    before: defaultdict[int, list[OpId]] = defaultdict(list)
    begun: defaultdict[int, list[OpId]] = defaultdict(list)
    gone: defaultdict[int, list[OpId]] = defaultdict(list)
    for trip in sorted(trips, key=lambda trip: (trip.stay.following, trip.stay.value)):
        copies = ops[trip.stay.value]
        begun[trip.stay.birth].append(copies.out)
        gone[trip.gone].append(copies.gone)
        before[trip.back].append(copies.back)
    steps: list[OpId] = []
    for step, number in enumerate(schedule.steps):
        steps += [*before[step], number, *begun[step], *gone[step]]
    return Schedule(tuple(steps))


def without_bytes(problem: Problem, values: Collection[int]) -> Problem:
    """The same as if these values took no memory; nothing is written over them, or by what makes them."""
    sizes = tuple(0 if value in values else size for value, size in enumerate(problem.costs.size_bytes))
    ops = tuple(
        replace(op, overwrites=()) if op.overwrites and not {*op.overwrites, *op.outputs}.isdisjoint(values) else op
        for op in problem.graph.ops
    )
    graph = replace(problem.graph, ops=ops)
    return replace(problem, graph=graph, costs=replace(problem.costs, size_bytes=sizes))
