"""Schedules around values that are away: what copies do not free is computed again, and nothing more.

In: a problem with copies, a schedule of it without, and trips to the host. Out: the fastest schedule found within the
budget that makes these trips. The schedule is edited with the bytes of its trips taken away where they are on the host
(`EditableSchedule.send_away`): dropping, pruning and the neighbourhood search then know how much room there is. What
they find is put together with its copies and followed exactly; what does not fit is not taken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from remat.core.copies import without_copies
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.schedule.editable import EditableSchedule, extra_keys
from remat.solvers.schedule.evict import MAX_GROWTH_FACTOR, PRICES, EvictionRule, evict, unit_price
from remat.solvers.schedule.prune import prune
from remat.solvers.schedule.to_host import Trip, with_trips
from remat.solvers.search.neighbourhood import SearchLimits, improve

SEARCH = SearchLimits(rounds=300, patience=80, work=200_000)


@dataclass(frozen=True, slots=True)
class TravelPlan:
    """A schedule that fits."""

    steps: Schedule
    """With copies."""
    computing: Schedule
    """Without."""
    time_ns: float


def around_trips(
    problem: Problem,
    schedule: Schedule,
    trips: Sequence[Trip],
    stop: Callable[[], bool],
    seed: int = 0,
    promising_ns: float = float("inf"),
) -> TravelPlan | None:
    """See the module's docstring; None where nothing was found, or where the schedule cannot be edited.

    What takes longer than `promising_ns` before the search is not searched from: that takes most of the time.
    """
    plain = without_copies(problem)
    keys = step_keys(schedule, len(plain.graph.ops))
    if keys is None:
        return None
    search = _Search(problem, plain, [KeyTrip(trip, keys[trip.gone], keys[trip.back]) for trip in trips])
    extra = extra_keys(schedule, len(plain.graph.ops)) or []
    for price in (0.0, *PRICES):
        if stop():
            break
        search.drop(extra, price, stop)
    if search.best is not None and search.best.time_ns <= promising_ns and not stop():
        search.improve(stop, seed)
    return search.best


@dataclass(frozen=True, slots=True)
class KeyTrip:
    """A trip by the keys of its steps: these stay where they are when others come and go."""

    trip: Trip
    gone: int
    back: int


class _Search:
    def __init__(self, problem: Problem, plain: Problem, trips: list[KeyTrip]) -> None:
        self.problem, self.trips = problem, trips
        self.best: TravelPlan | None = None
        producers = plain.graph.producers()
        fixed = {producers[item.trip.stay.value] for item in trips}
        # What is away is not computed again: it would count twice.
        ops = tuple(
            replace(op, recomputable=op.recomputable and n not in fixed) for n, op in enumerate(plain.graph.ops)
        )
        self.plain = replace(plain, graph=replace(plain.graph, ops=ops))

    def _editable(self, extra: Sequence[int]) -> EditableSchedule:
        made = EditableSchedule(self.plain, extra)
        for item in self.trips:
            made.send_away(item.trip.stay.value, item.gone, item.back)
        return made

    def drop(self, extra: Sequence[int], price: float, stop: Callable[[], bool]) -> None:
        """Compute again what it takes to fit."""
        editable, budget = self._editable(extra), self.problem.budget_bytes
        rule = EvictionRule(price=price * unit_price(editable))
        if evict(editable, budget, rule, stop=stop, max_steps=MAX_GROWTH_FACTOR * editable.flat.count):
            prune(editable, budget)
            self.offer(editable)

    def improve(self, stop: Callable[[], bool], seed: int) -> None:
        assert self.best is not None
        extra = extra_keys(self.best.computing, len(self.plain.graph.ops)) or []
        improve(self._editable(extra), self.problem.budget_bytes, SEARCH, seed, stop, self.offer)

    def offer(self, editable: EditableSchedule) -> None:
        computing = editable.schedule()
        keys = editable.keys.tolist()
        trips = [
            replace(item.trip, gone=bisect_right(keys, item.gone) - 1, back=bisect_left(keys, item.back))
            for item in self.trips
        ]
        steps = with_trips(self.problem, computing, [_born(trip, keys, self.plain) for trip in trips])
        timeline = simulate(self.problem, steps)
        if timeline.peak_bytes <= self.problem.budget_bytes and (
            self.best is None or timeline.time_ns < self.best.time_ns
        ):
            self.best = TravelPlan(steps, computing, timeline.time_ns)


def _born(trip: Trip, keys: list[int], plain: Problem) -> Trip:
    """The trip, with the place at which its value is made in another schedule."""
    count = len(plain.graph.ops)
    maker = plain.graph.producers()[trip.stay.value]
    return replace(trip, stay=replace(trip.stay, birth=bisect_left(keys, maker * count + maker)))


def step_keys(schedule: Schedule, count: int) -> list[int] | None:
    """The key of every step; None where an editable schedule cannot hold this one."""
    if extra_keys(schedule, count) is None:
        return None
    keys, stage = [], 0
    for number in schedule.steps:
        keys.append(stage * count + number)
        stage += number == stage
    return keys
