"""A solution that fits when it really runs, for every framework.

In: a problem and a solver. Out: a `Fitted`. What runs can need more than what the solver counted; where it does, the
solver is asked again for less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from remat.core.arena import Arena
from remat.core.budget import BudgetScope
from remat.core.graph import Graph
from remat.core.memory_rules import MemoryRules
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import InfeasibleBudget

if TYPE_CHECKING:
    from remat.solvers import Progress, Solver

ARENA_SHARE, MOST_ARENA_S = 0.25, 5.0
"""Of the time for solving, and at most: for an arena below the budget, each time one is looked for."""
MOST_UNCOUNTED_S = 0.1
"""At most for an arena that is told and not counted."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A solution that fits when it really runs."""

    solution: Solution
    slack_bytes: int = 0
    """What the device's allocator, or a graph that is kept, takes at the peak beyond the live bytes."""
    arena: Arena | None = None
    """There where the budget counts it."""


@dataclass(slots=True)
class LeanestSeen:
    """The leanest schedule of earlier searches: what a refusal named as enough must be enough the next time."""

    graph: Graph | None = None
    schedule: Schedule | None = None

    def of(self, problem: Problem) -> Schedule | None:
        return self.schedule if self.graph == problem.graph else None

    def note(self, problem: Problem, schedule: Schedule) -> None:
        self.graph, self.schedule = problem.graph, schedule


def solve_within(
    problem: Problem,
    solver: str | Solver,
    *,
    rules: MemoryRules,
    tidy: Callable[[Schedule], Schedule] | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[Solution, int]:
    """A solution whose live bytes fit when it really runs, and how much the allocator takes beyond them."""
    fitted = fit_within(
        problem, solver, rules=rules, tidy=tidy, time_limit_s=time_limit_s, seed=seed, progress=progress
    )
    return fitted.solution, fitted.slack_bytes


def fit_within(
    problem: Problem,
    solver: str | Solver,
    *,
    rules: MemoryRules,
    tidy: Callable[[Schedule], Schedule] | None = None,
    kept_peak: Callable[[Schedule], int] | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    counts: BudgetScope = BudgetScope.LIVE,
    seen: LeanestSeen | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Fitted:
    """A solution that fits when it really runs.

    Ops first run in the order that `solvers/schedule/order.py` finds; what is proven holds for that order.
    Four things can lift the real need above the solver's peak: with several calls, an op may have to wait for its own
    graph's program (see `Step.tidy`), CUDA's allocator hands out blocks larger than what was asked for, a backward that
    keeps its graph frees nothing of it (`kept_peak` tells the peak then), and an arena may be higher than what is alive
    in it, where that is counted.
    """
    from remat.solvers import infeasible, solve
    from remat.solvers.schedule.order import order_ops, reordered, translated

    order = order_ops(problem).order
    ordered = reordered(problem, order)

    def attempt(reserve: int, time_share: float) -> Solution:
        within = ordered.with_budget(problem.budget_bytes - reserve)
        try:
            found = solve(within, solver, time_limit_s=time_limit_s * time_share, seed=seed, progress=progress)
        except InfeasibleBudget as error:
            if reserve == 0:
                raise
            raise infeasible(problem, error.min_budget + reserve) from None
        return found if found.schedule is None else replace(found, schedule=translated(found.schedule, order))

    def arena_of(schedule: Schedule) -> Arena | None:
        capacity = problem.budget_bytes - problem.resident_bytes
        limit = min(ARENA_SHARE * time_limit_s, MOST_ARENA_S)
        return lay_out(problem, schedule, rules=rules, capacity_bytes=capacity, time_limit_s=limit)

    def slack_of(schedule: Schedule, peak: int) -> int:
        kept = max(0, kept_peak(schedule) - peak) if kept_peak is not None else 0
        return kept + rules.slack_bytes(problem, schedule)

    least_slack = rules.least_slack_bytes(problem)
    is_exact = tidy is None and kept_peak is None and least_slack == 0 and counts is BudgetScope.LIVE
    addressed = arena_of if counts is BudgetScope.ARENA else None
    return _fitted(problem, attempt, tidy, slack_of, addressed, least_slack, seen or LeanestSeen(), is_exact=is_exact)


def _fitted(
    problem: Problem,
    attempt: Callable[[int, float], Solution],
    tidy: Callable[[Schedule], Schedule] | None,
    slack_of: Callable[[Schedule, int], int],
    arena_of: Callable[[Schedule], Arena | None] | None = None,
    least_slack_bytes: int = 0,
    seen: LeanestSeen | None = None,
    *,
    is_exact: bool = False,
) -> Fitted:
    """Where what was found does not fit, lower the solver's budget and solve again.

    Each time by more and, from the third on, in half the time, so that it ends. The bound stays the first one, which
    holds for every schedule, as none can do without the least that an allocator takes: those for less memory than
    there is prove too much. Where the solver knows all that a schedule needs (`is_exact`), what it refuses is refused.
    Before anything else is, the step as it is counts too, for leaner ones can have more that a kept graph holds; and so
    does what earlier searches have `seen`, for a search takes as long as it may and does not find the same each time.
    """
    as_run = partial(_as_run, problem, tidy, slack_of, arena_of)
    reserve, bound = least_slack_bytes, math.inf
    refused: InfeasibleBudget | None = None
    leanest: Solution | None = None
    for round in itertools.count():
        try:
            solution = attempt(reserve, 0.5 ** max(0, round - 1))
        except InfeasibleBudget as error:
            if is_exact:
                raise
            if refused is not None:
                break
            # Doubling may have passed over the leanest schedule: it is tried last, and tells the smallest budget.
            refused, reserve = error, problem.budget_bytes - (error.min_budget - reserve)
            continue
        if solution.schedule is None:
            return Fitted(solution)
        bound = solution.bound_ns if round == 0 else bound
        found, excess = as_run(solution)
        if excess <= 0:
            status = solution.status if bound >= solution.bound_ns else Status.FEASIBLE
            bound = min(bound, solution.bound_ns)
            return replace(found, solution=replace(found.solution, status=status, bound_ns=bound))
        if refused is not None:
            leanest = solution
            break
        reserve += excess * 2**round
    assert refused is not None, "the rounds end where something was refused"
    return _last_resort(problem, as_run, refused, leanest, seen or LeanestSeen())


def _as_run(
    problem: Problem,
    tidy: Callable[[Schedule], Schedule] | None,
    slack_of: Callable[[Schedule, int], int],
    arena_of: Callable[[Schedule], Arena | None] | None,
    solution: Solution,
) -> tuple[Fitted, int]:
    """What really runs of a solution, and by how much that exceeds the budget."""
    assert solution.schedule is not None
    schedule = tidy(solution.schedule) if tidy is not None else solution.schedule
    peak = simulate(problem, schedule).peak_bytes
    slack = slack_of(schedule, peak)
    # What is too much without addresses is too much with them.
    arena = arena_of(schedule) if arena_of is not None and peak + slack <= problem.budget_bytes else None
    height = problem.resident_bytes + arena.height_bytes if arena is not None else 0
    excess = max(peak + slack, height) - problem.budget_bytes
    return Fitted(replace(solution, schedule=schedule, peak_bytes=peak), slack, arena), excess


def _last_resort(
    problem: Problem,
    as_run: Callable[[Solution], tuple[Fitted, int]],
    refused: InfeasibleBudget,
    leanest: Solution | None,
    seen: LeanestSeen,
) -> Fitted:
    """The step as it is, or what earlier searches have seen, where one of them fits; else the refusal."""
    from remat.solvers import infeasible

    others = [plain_schedule(problem.graph), seen.of(problem), leanest.schedule if leanest is not None else None]
    tried = [as_run(_given(problem, schedule)) for schedule in others if schedule is not None]
    best, excess = min(tried, key=lambda item: item[1])
    if excess <= 0:
        return best
    if leanest is None and refused.min_budget < problem.budget_bytes + excess:
        raise refused
    assert best.solution.schedule is not None
    seen.note(problem, best.solution.schedule)
    raise infeasible(problem, problem.budget_bytes + excess)


def _given(problem: Problem, schedule: Schedule) -> Solution:
    """A schedule that no solver was asked for."""
    time = simulate(problem, schedule).time_ns
    status = Status.OPTIMAL if time <= problem.base_time_ns else Status.FEASIBLE
    return Solution(status, schedule, time, 0, problem.base_time_ns, problem.budget_bytes, "none")


def lay_out(
    problem: Problem,
    schedule: Schedule | None,
    *,
    rules: MemoryRules,
    capacity_bytes: int | None = None,
    time_limit_s: float = MOST_UNCOUNTED_S,
) -> Arena | None:
    """Addresses for everything that `schedule` computes; None where there is none."""
    from remat.layout import arena

    if schedule is None:
        return None
    return arena.lay_out(
        problem,
        schedule,
        block_bytes=rules.address_step_bytes,
        capacity_bytes=capacity_bytes,
        time_limit_s=time_limit_s,
    )
