"""The portfolio: a good schedule at once, a proven bound, then improvement until the gap or the time limit.

In order: the plain schedule; the known strategies, made to fit; greedy dropping at several prices of a byte; the cut
program, which gives the bound and what to keep; then in turns a search around the best schedule, more of the known
strategies, and the cut program where that schedule shows it to be blind. Each schedule is followed byte by byte, so the
peak is respected at every step. Without HiGHS the rest works, with the plain time as the bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import plain_schedule
from remat.core.solution import Solution, Status
from remat.solvers.anneal import Anneal
from remat.solvers.base import Progress, Strategy, judge
from remat.solvers.bounds import Refinement
from remat.solvers.chain_dp import ChainDp
from remat.solvers.dtr import Dtr
from remat.solvers.genetic import Genetic
from remat.solvers.highs import is_available
from remat.solvers.mu_two import MuTwo
from remat.solvers.pressure import Pressure
from remat.solvers.prune import prune
from remat.solvers.run import Run
from remat.solvers.search import SearchLimits, improve
from remat.solvers.start import try_dropping, try_squeezing, try_strategies
from remat.solvers.states import shortest_schedule
from remat.solvers.tape import Tape
from remat.solvers.tree_dp import TreeDp

QUICK: tuple[Strategy, ...] = (Pressure(), Dtr(), ChainDp())
"""Tried at once, on graphs of up to `QUICK_OPS` ops."""
QUICK_OPS = 600
SLOW: tuple[Strategy, ...] = (MuTwo(), TreeDp(), Genetic(), Anneal())
"""Tried one by one where the gap stays open."""
PATIENCE = 3
"""Turns of the search alone without a better schedule after which the portfolio gives up."""


@final
@dataclass(frozen=True, slots=True)
class Auto:
    name: str = "auto"
    gap: float = 1e-3
    """Stop once the schedule is proven to be within this share of the best one."""
    first_search: SearchLimits = SearchLimits(patience=60, work=100_000)
    """Before more cuts are tried."""
    search: SearchLimits = SearchLimits()
    use_cuts: bool = True
    clock: Callable[[], float] = time.monotonic

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        plain = judge(problem, plain_schedule(problem.graph), self.name)
        if plain.status is not Status.INFEASIBLE:
            return plain
        run = Run(problem, gap=self.gap, time_limit_s=time_limit_s, clock=self.clock, progress=progress)
        lowest = None
        try:
            if floor_bytes(problem)[0] <= problem.budget_bytes:
                lowest = self._search(run, seed)
        except KeyboardInterrupt:
            # Anytime: who interrupts a solve wants what it has; with nothing to return, they want out.
            if not run.has_schedule():
                raise
            return replace(_conclude(run, self.name, None), reason="Interrupted.")
        return _conclude(run, self.name, lowest)

    def _search(self, run: Run, seed: int) -> Tape | None:
        """Fill the run; returns the lowest tape where none was found that fits."""
        try_strategies(run)
        try_dropping(run)
        if len(run.problem.graph.ops) <= QUICK_OPS:
            _propose(run, QUICK, seed)
        if run.stop():
            return None
        program = Refinement(run, seed) if self.use_cuts and is_available() else None
        if program is not None:
            program.advance()
        lowest = None if run.has_schedule() or run.closed() else try_squeezing(run)
        self._close(run, program, lowest, seed)
        if not run.stop():
            _shortest(run)
        return lowest

    def _close(self, run: Run, program: Refinement | None, lowest: Tape | None, seed: int) -> None:
        """Search for better schedules and better bounds in turns until the gap is closed or neither gets further."""
        limits, idle, others = self.first_search, 0, SLOW
        # A copy, because the budget that is named in the end must be one that can be found again.
        lowering = None if lowest is None else run.tape(lowest.extra_steps())
        while not run.stop() and idle < PATIENCE:
            before = run.best_extra
            tape = lowering if run.best is None else run.tape(run.best)
            if tape is not None:
                improve(tape, run.budget, limits, seed, run.stop, run.offer_found)
            _propose(run, others[:1], seed)
            others = others[1:]
            if program is not None and not program.exhausted:
                program.advance()
                idle = 0
            else:
                idle = 0 if run.best_extra < before else idle + 1
            limits, seed = self.search, seed + 1


def _propose(run: Run, strategies: Sequence[Strategy], seed: int) -> None:
    """What other strategies find within the budget, as it is and pruned."""
    for strategy in strategies:
        if run.stop():
            return
        found = strategy.solve(run.problem, time_limit_s=run.left_s(), seed=seed).schedule
        if found is not None and run.offer_schedule(found, strategy.name) and run.best is not None:
            tape = run.tape(run.best)
            prune(tape, run.budget)
            run.offer(tape, strategy.name)


def _shortest(run: Run) -> None:
    """Small graphs are settled for good."""
    found = shortest_schedule(run.problem, run.best_extra)
    if found.schedule is not None:
        run.offer_schedule(found.schedule, "shortest path")
    if found.complete:
        run.raise_bound(run.best_extra, "shortest path")


def _conclude(run: Run, name: str, lowest: Tape | None) -> Solution:
    if lowest is None and not run.has_schedule():
        lowest = try_squeezing(run)
    schedule = run.schedule()
    if schedule is not None:
        bound = run.base_time + run.bound_extra
        return judge(run.problem, schedule, name, bound_ns=bound, reason=_why_stopped(run))
    assert lowest is not None
    proven = run.bound_extra == float("inf") or floor_bytes(run.problem)[0] > run.budget
    return Solution(
        status=Status.INFEASIBLE,
        schedule=None,
        time_ns=run.base_time + lowest.extra_time,
        peak_bytes=lowest.peak,
        bound_ns=run.base_time,
        min_budget_bytes=lowest.peak,
        solver=name,
        reason="No schedule fits this budget." if proven else "No schedule that fits was found.",
    )


def _why_stopped(run: Run) -> str:
    if run.closed():
        return "Within the gap that was asked for."
    return "The time limit was reached." if run.left_s() <= 0 else "Nothing better was found."
