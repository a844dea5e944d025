"""Every strategy under one roof. A new solver is one file and one line in `REGISTRY`.

`solve` is the arrow from a `Problem` to a `Solution`: whatever a solver returns is validated before it leaves, and a
budget that nothing fits is an `InfeasibleBudget` with the smallest one known.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

from remat.core.problem import Problem
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.errors import UnknownName
from remat.solvers.anneal import Anneal
from remat.solvers.auto import Auto
from remat.solvers.backends import get_backend
from remat.solvers.base import Progress, Solver, infeasible
from remat.solvers.benefit_cost import BenefitCost
from remat.solvers.chain_dp import ChainDp
from remat.solvers.chen_greedy import ChenGreedy
from remat.solvers.cp_sat import CpSat
from remat.solvers.critical_path import CriticalPath
from remat.solvers.dtr import Dtr
from remat.solvers.every_n import EveryN
from remat.solvers.floor import min_budget
from remat.solvers.full import FullBlocks
from remat.solvers.genetic import Genetic
from remat.solvers.lp_rounding import LpRounding
from remat.solvers.milp import Milp
from remat.solvers.mu_two import MuTwo
from remat.solvers.none import KeepAll
from remat.solvers.overwrite import Overwriting
from remat.solvers.pressure import Pressure
from remat.solvers.reorder import Reordered
from remat.solvers.revolve import Revolve
from remat.solvers.selective import Selective
from remat.solvers.sqrt_n import SqrtN
from remat.solvers.tree_dp import TreeDp
from remat.solvers.treeverse import Treeverse

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

DEFAULT_TIME_LIMIT_S = 10.0

__all__ = [
    "DEFAULT_TIME_LIMIT_S",
    "REGISTRY",
    "Progress",
    "Solver",
    "get_solver",
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


def solve(
    problem: Problem,
    solver: str | Solver = "auto",
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
    if isinstance(chosen, Auto):
        chosen = replace(chosen, gap=gap)
    asked: Solver = Overwriting(chosen)
    asked = Reordered(asked) if reorder else asked
    solution = asked.solve(problem, time_limit_s=time_limit_s, seed=seed, progress=progress)
    if solution.status is Status.INFEASIBLE or solution.schedule is None:
        raise infeasible(problem, solution.min_budget_bytes, "" if isinstance(chosen, Auto) else chosen.name)
    validate(problem, solution.schedule, keep_order=not reorder)
    return solution
