"""A schedule that fits, at once: what the portfolio and the exact solvers start from, and fall back to.

In: an incumbent. Out: schedules offered to it: the known strategies and greedy dropping, made to fit and pruned; where
none of them fits, the smallest peak we know how to reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import OutOfTime
from remat.core.search.limits import Limits
from remat.solvers.base import Strategy
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.evict import PRICES, EvictionRule, unit_price
from remat.solvers.schedule.keep import drop_all_but, first_backward
from remat.solvers.schedule.prune import prune, remove_unused
from remat.solvers.search.floor import lowest_editable, squeeze
from remat.solvers.search.incumbent import ScheduleIncumbent
from remat.solvers.search.neighbourhood import SearchLimits, improve
from remat.solvers.strategies.full import FullBlocks
from remat.solvers.strategies.keep_sets import keep_sets
from remat.solvers.strategies.selective import Selective
from remat.solvers.strategies.sqrt_n import SqrtN

AT_ONCE: tuple[Strategy, ...] = (SqrtN(), FullBlocks(), Selective())
MANY_OPS = 5_000
"""From here on a schedule of one strategy may take as long as the whole limit, so that a quick one comes first."""
START_S = 2.0
"""How long an exact solver looks for a schedule to start from."""
SEARCH = SearchLimits(rounds=200, patience=60, work=100_000)


def try_at_once(incumbent: ScheduleIncumbent) -> None:
    """Of many ops: strategies that take time in proportion to them, before anything that takes more."""
    if len(incumbent.problem.graph.ops) > MANY_OPS:
        propose(incumbent, AT_ONCE, incumbent.limits.seed)


def propose(incumbent: ScheduleIncumbent, strategies: Sequence[Strategy], seed: int) -> None:
    """What other strategies find within the budget, as it is and pruned."""
    for strategy in strategies:
        if incumbent.stop():
            return
        found = strategy.solve(incumbent.problem, Limits(incumbent.left_s(), seed=seed))
        incumbent.lowest_peak = min(incumbent.lowest_peak, found.peak_bytes)
        fits = found.schedule is not None and incumbent.offer_schedule(found.schedule, strategy.name)
        if fits and incumbent.best_steps is not None and strategy not in AT_ONCE:
            editable = incumbent.editable(incumbent.best_steps)
            prune(editable, incumbent.budget)
            incumbent.offer(editable, strategy.name)


def try_strategies(incumbent: ScheduleIncumbent) -> None:
    """The known strategies, as they are, then pruned where they fit and made to fit where they do not."""
    for name, kept in keep_sets(incumbent.problem):
        editable = incumbent.editable()
        drop_all_but(editable, [kept], [first_backward(incumbent.problem)])
        remove_unused(editable)
        incumbent.offer(editable, name)
        incumbent.fit(editable, EvictionRule(price=PRICES[0] * unit_price(editable)), name)


def try_dropping(incumbent: ScheduleIncumbent, steps: Sequence[int] = (), source: str = "greedy") -> None:
    """The plain schedule with `steps` added, made to fit by greedy dropping at several prices of a byte."""
    for price in (0.0, *PRICES):
        editable = incumbent.editable(steps)
        incumbent.fit(editable, EvictionRule(price=price * unit_price(editable)), source)
        if incumbent.stop():
            return


def try_squeezing(incumbent: ScheduleIncumbent) -> EditableSchedule:
    """Nothing fits yet: go as low as we can, then take back what the budget allows; returns the lowest schedule.

    The second attempt is the one behind `min_budget`, so that a budget which Remat itself named is never refused. The
    third goes for this budget alone, and sometimes gets there where the way to the very bottom passes it by.
    """
    problem, budget, stop = incumbent.problem, incumbent.budget, incumbent.is_overdue
    editable = squeeze(problem, budget, stop)
    if editable.peak > budget:
        editable = lowest_editable(problem, stop)
    near = editable
    if editable.peak > budget and incumbent.is_possible:
        near = lowest_editable(problem, stop, budget)
    if near.peak <= budget:
        prune(near, budget)
        incumbent.offer(near, "squeezed")
    return editable


def quick_schedule(problem: Problem, limits: Limits) -> Schedule | None:
    """The best of the above after a short search of its own time; None where even the smallest peak is too high."""
    limits = replace(limits, time_limit_s=START_S, gap=0.0)
    incumbent = ScheduleIncumbent(problem, limits, grace_s=START_S)
    with suppress(OutOfTime):
        try_at_once(incumbent)
        try_strategies(incumbent)
        try_dropping(incumbent)
        if incumbent.best_steps is None:
            try_squeezing(incumbent)
        if incumbent.best_steps is not None:
            editable = incumbent.editable(incumbent.best_steps)
            improve(editable, incumbent.budget, SEARCH, limits.seed, incumbent.stop, incumbent.offer_found)
    return incumbent.best


def repair(problem: Problem, schedule: Schedule, limits: Limits) -> Schedule | None:
    """A schedule that may be over the budget, made to fit; stages run their ops in graph order, once each."""
    incumbent = ScheduleIncumbent(problem, replace(limits, gap=0.0))
    count = len(problem.graph.ops)
    newest, steps = -1, dict[int, None]()
    for number in schedule.steps:
        if number > newest:
            newest = number
        else:
            steps[(newest + 1) * count + number] = None
    with suppress(OutOfTime):
        try_dropping(incumbent, tuple(steps), "repair")
    return incumbent.best
