"""Several solvers at several budgets on one problem.

In: a problem, whose own budget does not count, and solvers. Out: a `Point` for each budget and solver, from the plain
peak, which needs no recomputation, down to just above the floor, below which nothing fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from remat.core.eager import as_eager
from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import plain_schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution
from remat.errors import InfeasibleBudget, MissingExtra
from remat.solvers import solve
from remat.solvers.base import Solver

LAST_OVER_FLOOR = 1.02


@dataclass(frozen=True, slots=True)
class Point:
    """What one solver did at one budget; where `solution` is None, `reason` says why."""

    budget_bytes: int
    solver: str
    seconds: float
    solution: Solution | None
    reason: str = ""


def sweep_budgets(problem: Problem, count: int) -> tuple[int, ...]:
    """`count` budgets in equal steps from the plain peak to 1.02 times the floor; fewer where they fall together."""
    top = plain_peak_bytes(problem)
    bottom = min(top, int(LAST_OVER_FLOOR * floor_bytes(problem)[0]))
    return even_budgets(top, bottom, count)


def even_budgets(top: int, bottom: int, count: int) -> tuple[int, ...]:
    """`count` budgets in equal steps from `top` down to `bottom`; fewer where they fall together."""
    steps = max(1, count - 1)
    return tuple(dict.fromkeys(top - (top - bottom) * step // steps for step in range(count)))


def plain_peak_bytes(problem: Problem) -> int:
    return simulate(as_eager(problem), plain_schedule(problem.graph)).peak_bytes


def sweep(
    problem: Problem,
    solvers: Sequence[Solver],
    budgets: Sequence[int],
    limits: Limits,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Point]:
    """Budget by budget, solver by solver; the limits hold for each."""
    for budget in budgets:
        for solver in solvers:
            start = clock()
            found, reason = _try(problem.with_budget(budget), solver, limits)
            yield Point(budget, solver.name, clock() - start, found, reason)


def _try(problem: Problem, solver: Solver, limits: Limits) -> tuple[Solution | None, str]:
    """What the solver finds, or why it finds nothing."""
    time_limit_s, seed, gap = limits.time_limit_s, limits.seed, limits.gap
    try:
        return solve(problem, solver, time_limit_s=time_limit_s, seed=seed, gap=gap), ""
    except (InfeasibleBudget, MissingExtra) as error:
        return None, str(error)
