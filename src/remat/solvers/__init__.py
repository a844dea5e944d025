"""Every strategy under one roof. A new solver is one file and one line in `REGISTRY`.

`solve` is the arrow from a `Problem` to a `Solution`: whatever a solver returns is validated before it leaves, and a
budget that nothing fits is an `InfeasibleBudget` with the smallest one known.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from remat.core.copies import has_copies
from remat.core.problem import Problem, floor_bytes
from remat.core.search.deadline import within
from remat.core.search.limits import Limits
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.errors import UnknownName
from remat.solvers.auto import Auto
from remat.solvers.backends import get_backend
from remat.solvers.base import MovesValues, Progress, Solver, infeasible, judge
from remat.solvers.exact.cp_sat import CpSat
from remat.solvers.exact.lp_rounding import LpRounding
from remat.solvers.exact.milp import Milp
from remat.solvers.offloading import Offloading
from remat.solvers.overwriting import Overwriting
from remat.solvers.reorder import Reordered
from remat.solvers.search.certain import certain_schedule
from remat.solvers.search.floor import min_budget
from remat.solvers.search.incumbent import GRACE_S
from remat.solvers.strategies.anneal import Anneal
from remat.solvers.strategies.benefit_cost import BenefitCost
from remat.solvers.strategies.chain_dp import ChainDp
from remat.solvers.strategies.chen_greedy import ChenGreedy
from remat.solvers.strategies.critical_path import CriticalPath
from remat.solvers.strategies.dtr import Dtr
from remat.solvers.strategies.every_n import EveryN
from remat.solvers.strategies.full import FullBlocks
from remat.solvers.strategies.genetic import Genetic
from remat.solvers.strategies.mu_two import MuTwo
from remat.solvers.strategies.none import KeepAll
from remat.solvers.strategies.pressure import Pressure
from remat.solvers.strategies.revolve import Revolve
from remat.solvers.strategies.selective import Selective
from remat.solvers.strategies.sqrt_n import SqrtN
from remat.solvers.strategies.tree_dp import TreeDp
from remat.solvers.strategies.treeverse import Treeverse

REGISTRY: tuple[Solver, ...] = (
    Auto(),
    KeepAll(),
    TreeDp(),
    ChainDp(),
    Dtr(),
    Pressure(),
    MuTwo(),
    Genetic(),
    Anneal(),
    BenefitCost(),
    CriticalPath(),
    Treeverse(),
    Revolve(),
    ChenGreedy(),
    Selective(),
    FullBlocks(),
    EveryN(),
    SqrtN(),
    Milp(),
    CpSat(),
    LpRounding(),
)
"""In order of preference."""

PORTFOLIO = "auto"
"""The solver of which everything that Remat knows is asked."""
DEFAULT_TIME_LIMIT_S = 10.0

FINISH_S = 6e-5
"""Seconds kept back for each op, in which the last piece of work is finished and the answer is checked and written."""

__all__ = [
    "DEFAULT_TIME_LIMIT_S",
    "REGISTRY",
    "Progress",
    "Solver",
    "get_solver",
    "hard_limit_s",
    "infeasible",
    "min_budget",
    "solve",
]


def get_solver(name: str) -> Solver:
    """The solver of that name, with its default options; `milp:scip` is `milp` on another library."""
    head, _, backend = name.partition(":")
    for solver in REGISTRY:
        if solver.name == name:
            return solver
        if solver.name == head and isinstance(solver, Milp):
            get_backend(backend)
            return replace(solver, name=name, backend=backend)
    known = [solver.name for solver in REGISTRY]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean `{close[0]}`? Choose" if close else "choose"
    raise UnknownName(f"There is no solver `{name}`; {hint} one of {', '.join(known)}.")


def hard_limit_s(problem: Problem, time_limit_s: float) -> float:
    """When a search is ended wherever it is: after the grace in which to find a first schedule.

    With copies there may be two searches: see `offloading`.
    """
    searches = 2 if has_copies(problem.graph) else 1
    return max(0.0, searches * (time_limit_s + GRACE_S) - FINISH_S * len(problem.graph.ops))


def solve(
    problem: Problem,
    solver: str | Solver = PORTFOLIO,
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    seed: int = 0,
    gap: float = 1e-3,
    reorder: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The fastest schedule the solver finds within the budget and the time limit; `gap` is when auto may stop.

    First runs stay in the graph's order unless `reorder`; the bound then holds for any order. Raises
    `InfeasibleBudget` where nothing fits.
    """
    chosen = get_solver(solver) if isinstance(solver, str) else solver
    is_portfolio = chosen.name == PORTFOLIO
    asked: Solver = Overwriting(chosen, goes_on=is_portfolio)
    own = chosen if isinstance(chosen, MovesValues) else None
    asked = Offloading(Reordered(asked) if reorder else asked, own)
    with within(hard_limit_s(problem, time_limit_s)):
        solution = asked.solve(problem, Limits(time_limit_s, gap, seed), progress)
    if is_portfolio and solution.schedule is None:
        solution = _whatever_the_clock(problem, solution)
    if solution.status is Status.INFEASIBLE or solution.schedule is None:
        raise infeasible(problem, solution.min_budget_bytes, "" if is_portfolio else chosen.name)
    validate(problem, solution.schedule, keep_order=not reorder)
    return solution


def _whatever_the_clock(problem: Problem, found: Solution) -> Solution:
    """A busy machine must not decide between a plan and a refusal: what needs no search is tried in any case."""
    if has_copies(problem.graph) or floor_bytes(problem)[0] > problem.budget_bytes:
        return found
    certain = judge(problem, certain_schedule(problem), found.solver, reason="Found without a search.")
    return min(found, certain, key=lambda item: (item.schedule is None, item.min_budget_bytes))
