"""The portfolio: a good schedule at once, a proven bound, then improvement until the gap or the time limit.

In order: the plain schedule; on long graphs, what a price of a byte keeps; the known strategies, made to fit; greedy
dropping at several prices of a byte; the cut program, which gives the bound and what to keep; then in turns a search
around the best schedule, more of the known strategies, and the cut program where that schedule shows it to be blind.
Each schedule is followed byte by byte, so the peak is respected at every step. Without HiGHS and scipy the rest
works, with the plain time as the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import plain_schedule
from remat.core.search.deadline import OutOfTime
from remat.core.search.limits import Limits
from remat.core.solution import Solution, Status
from remat.solvers.backends.linear_highs import is_available
from remat.solvers.base import NO_SCHEDULE_FITS, Progress, Strategy, judge, nothing_fits
from remat.solvers.exact.bounds import Refinement
from remat.solvers.exact.long_graphs import try_prices
from remat.solvers.exact.shortest_path import shortest_schedule
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.search.incumbent import ScheduleIncumbent
from remat.solvers.search.neighbourhood import SearchLimits, improve
from remat.solvers.search.start import MANY_OPS, propose, try_at_once, try_dropping, try_squeezing, try_strategies
from remat.solvers.strategies.anneal import Anneal
from remat.solvers.strategies.chain_dp import ChainDp
from remat.solvers.strategies.dtr import Dtr
from remat.solvers.strategies.genetic import Genetic
from remat.solvers.strategies.mu_two import MuTwo
from remat.solvers.strategies.pressure import Pressure
from remat.solvers.strategies.tree_dp import TreeDp

QUICK: tuple[Strategy, ...] = (Pressure(), Dtr(), ChainDp())
"""Tried at once, on graphs of up to `QUICK_OPS` ops."""
QUICK_OPS = 600
PRICES_SHARE = 0.2
"""Of the time, for the priced cut of graphs that are neither small nor long."""
SLOW: tuple[Strategy, ...] = (MuTwo(), TreeDp(), Genetic(), Anneal())
"""Tried one by one where the gap stays open."""
PATIENCE = 3
"""Turns of the search alone without a better schedule after which the portfolio gives up."""


@final
@dataclass(frozen=True, slots=True)
class Auto:
    name: str = "auto"
    first_search: SearchLimits = SearchLimits(patience=60, work=100_000)
    """Before more cuts are tried."""
    search: SearchLimits = SearchLimits()
    use_cuts: bool = True

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        plain = judge(problem, plain_schedule(problem.graph), self.name)
        if plain.status is not Status.INFEASIBLE:
            return plain
        incumbent = ScheduleIncumbent(problem, limits, progress)
        lowest = None
        try:
            if floor_bytes(problem)[0] <= problem.budget_bytes:
                lowest = self._search(incumbent)
        except KeyboardInterrupt:
            # Anytime: who interrupts a solve wants what it has; with nothing to return, they want out.
            if incumbent.best is None:
                raise
            return replace(_conclude(incumbent, self.name, None), reason="Interrupted.")
        except OutOfTime:
            # What was found until now is the answer.
            pass
        return _conclude(incumbent, self.name, lowest)

    def _search(self, incumbent: ScheduleIncumbent) -> EditableSchedule | None:
        """Offer schedules and bounds; returns the lowest schedule where none was found that fits."""
        count = len(incumbent.problem.graph.ops)
        if count > QUICK_OPS:
            try_prices(incumbent, 1.0 if count > MANY_OPS else PRICES_SHARE)
        try_at_once(incumbent)
        try_strategies(incumbent)
        try_dropping(incumbent)
        if count <= QUICK_OPS:
            propose(incumbent, QUICK, incumbent.limits.seed)
        if incumbent.stop():
            return None
        program = Refinement(incumbent) if self.use_cuts and is_available() else None
        if program is not None:
            program.advance()
        lowest = None if incumbent.best is not None or incumbent.is_closed else try_squeezing(incumbent)
        self._close(incumbent, program, lowest)
        if not incumbent.stop():
            _shortest(incumbent)
        return lowest

    def _close(self, incumbent: ScheduleIncumbent, program: Refinement | None, lowest: EditableSchedule | None) -> None:
        """Search for better schedules and better bounds in turns until the gap is closed or neither gets further."""
        limits, idle, others, seed = self.first_search, 0, SLOW, incumbent.limits.seed
        # A copy, because the budget that is named in the end must be one that can be found again.
        lowering = None if lowest is None else incumbent.editable(lowest.extra_steps())
        while not incumbent.stop() and idle < PATIENCE:
            before = incumbent.value
            editable = lowering if incumbent.best_steps is None else incumbent.editable(incumbent.best_steps)
            if editable is not None:
                improve(editable, incumbent.budget, limits, seed, incumbent.stop, incumbent.offer_found)
            propose(incumbent, others[:1], seed)
            others = others[1:]
            if program is not None and not program.exhausted:
                program.advance()
                idle = 0
            else:
                idle = 0 if incumbent.value < before else idle + 1
            limits, seed = self.search, seed + 1


def _shortest(incumbent: ScheduleIncumbent) -> None:
    """Small graphs are settled for good."""
    found = shortest_schedule(incumbent.problem, incumbent.value)
    if found.schedule is not None:
        incumbent.offer_schedule(found.schedule, "shortest path")
    if found.complete:
        incumbent.raise_bound(incumbent.value, "shortest path")


def _conclude(incumbent: ScheduleIncumbent, name: str, lowest: EditableSchedule | None) -> Solution:
    if lowest is None and incumbent.best is None:
        with suppress(OutOfTime):
            lowest = try_squeezing(incumbent)
    if incumbent.best is not None:
        bound = incumbent.base_time + incumbent.bound
        return judge(incumbent.problem, incumbent.best, name, bound_ns=bound, reason=_why_stopped(incumbent))
    # Out of time, the smallest peak is that of the plain schedule, or of something that was tried.
    smallest = lowest.peak if lowest is not None else min(incumbent.lowest_peak, incumbent.editable().peak)
    proven = not incumbent.is_possible or floor_bytes(incumbent.problem)[0] > incumbent.budget
    reason = NO_SCHEDULE_FITS if proven else "No schedule that fits was found."
    return nothing_fits(
        incumbent.problem, name, smallest, reason, extra_ns=lowest.extra_time if lowest is not None else 0.0
    )


def _why_stopped(incumbent: ScheduleIncumbent) -> str:
    if incumbent.is_closed:
        return "Within the gap that was asked for."
    return "The time limit was reached." if incumbent.left_s() <= 0 else "Nothing better was found."
