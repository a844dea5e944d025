"""The smallest peak we know how to reach.

In: a problem, its budget ignored. Out: a schedule squeezed as far as it goes: whatever is idle at the peak is dropped
and computed again on demand, over and over, for a few ways of choosing between keeping and recomputing inputs; then a
search around it for lower ones. The smallest feasible budget lies between the need of the largest op (`floor_bytes`)
and this peak.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from remat.core.eager import without_overwrites
from remat.core.graph import Graph
from remat.core.problem import Costs, Problem, floor_bytes
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import OutOfTime, check_time
from remat.core.simulate import simulate
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.evict import MAX_GROWTH_FACTOR, PRICES, EvictionRule, evict, unit_price
from remat.solvers.schedule.keep import drop_all_but, first_backward
from remat.solvers.schedule.overwrite import always_overwritten, has_overwrites
from remat.solvers.search.neighbourhood import SearchLimits, improve
from remat.solvers.strategies.keep_sets import keep_sets

RANDOM_TRIES = 12
SQUEEZE_WORK = 100_000
"""Work on editable schedules after which a squeeze has to do with what it has: one or two seconds."""
LOWERING = SearchLimits(patience=150, work=50_000)
MOST_KNOWN = 16
_lowest_steps: dict[tuple[Graph, Costs], tuple[int, ...]] = {}
"""What the lowest schedules of the latest graphs compute again; oldest first."""


def min_budget(problem: Problem) -> int:
    """The smallest budget for which a schedule is known."""
    return simulate(problem, lowest_schedule(problem)).peak_bytes


def lowest_schedule(problem: Problem, stop: Callable[[], bool] = lambda: False, target: int = 0) -> Schedule:
    """The schedule with the smallest peak found, where ops may overwrite their inputs; see `lowest_editable`."""
    if not has_overwrites(problem):
        return lowest_editable(problem, stop, target).schedule()
    relaxed = lowest_editable(always_overwritten(problem), stop, target)
    found = [relaxed.schedule()]
    if simulate(problem, found[0]).peak_bytes > relaxed.peak:
        # It counts on overwriting what it reads again.
        found += [lowest_editable(without_overwrites(problem), stop, target).schedule(), plain_schedule(problem.graph)]
    return min(found, key=lambda schedule: simulate(problem, schedule).peak_bytes)


def lowest_editable(problem: Problem, stop: Callable[[], bool] = lambda: False, target: int = 0) -> EditableSchedule:
    """The schedule with the smallest peak found; the same for every budget, unless stopped, once within `target`, or
    out of time. Without a target it is looked for once: a plan asks for several budgets of the same graph.
    """
    known = (problem.graph, problem.costs)
    if not target and known in _lowest_steps:
        return EditableSchedule(problem, _lowest_steps[known])
    editable = _lower(problem, stop, target)
    with suppress(OutOfTime):
        check_time()
        if not target and not stop():
            _lowest_steps[known] = tuple(editable.extra_steps())
            while len(_lowest_steps) > MOST_KNOWN:
                del _lowest_steps[next(iter(_lowest_steps))]
    return editable


def _lower(problem: Problem, stop: Callable[[], bool], target: int) -> EditableSchedule:
    editable = squeeze(problem, target, stop)
    squeezed, goal = editable.extra_steps(), max(floor_bytes(problem)[0], target)
    try:
        if editable.peak > goal or not target:
            improve(editable, goal, LOWERING, 0, lambda: stop() or editable.peak <= target)
    except OutOfTime:
        # It ended in the middle of a change.
        return EditableSchedule(problem, squeezed)
    return editable


def squeeze(problem: Problem, target: int = 0, stop: Callable[[], bool] = lambda: False) -> EditableSchedule:
    """The schedule with the smallest peak found; stops early once the peak is within `target`, or out of time."""
    goal = max(floor_bytes(problem)[0], target)
    best = EditableSchedule(problem)
    work_left = SQUEEZE_WORK
    for rule, kept in _starts(problem, best):
        if best.peak <= goal or stop() or work_left <= 0:
            break
        editable = EditableSchedule(problem)
        limit, longest = min(work_left, SQUEEZE_WORK // 4), MAX_GROWTH_FACTOR * editable.flat.count
        try:
            if kept is not None:
                drop_all_but(editable, [kept], [first_backward(problem)])
            evict(editable, goal, rule, stop=partial(_spent, editable, limit, stop), max_steps=longest)
        except OutOfTime:
            break
        work_left -= editable.work
        if editable.peak < best.peak:
            best = editable
    return best


def _spent(editable: EditableSchedule, limit: int, stop: Callable[[], bool]) -> bool:
    return editable.work > limit or stop()


def _starts(problem: Problem, plain: EditableSchedule) -> Iterator[tuple[EvictionRule, frozenset[int] | None]]:
    """How to choose, and what the schedule to begin with keeps: plain, then known strategies, then random choices."""
    unit, count = unit_price(plain), plain.flat.count
    for price in PRICES:
        yield EvictionRule(price=price * unit), None
    for _, kept in keep_sets(problem):
        yield EvictionRule(price=PRICES[1] * unit), kept
    rng = random.Random(0)
    for number in range(RANDOM_TRIES):
        factors = [rng.lognormvariate(0.0, 0.7) for _ in range(count)]
        price = unit * 10 ** rng.uniform(-1.0, 2.0)
        bold, early = number % 2 == 1, number % 4 >= 2
        yield EvictionRule(price=price, weight=factors.__getitem__, bold=bold, early=early), None
