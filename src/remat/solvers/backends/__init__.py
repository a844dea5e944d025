"""Which library solves a mixed-integer program: HiGHS, SCIP, Gurobi or CPLEX, each where it is installed.

In: a `MixedIntegerProgram`, `Limits`, and a point to start from where one is known. Out: a `ProgramAnswer`. Each
library is imported inside the one function that calls it. One whose licence refuses a program of this size raises
`TooLarge`.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.core.search.limits import Limits
from remat.errors import UnknownName
from remat.solvers.backends.cplex import solve_with_cplex
from remat.solvers.backends.gurobi import solve_with_gurobi
from remat.solvers.backends.highs import solve_with_highs
from remat.solvers.backends.licence import TooLarge
from remat.solvers.backends.program import MixedIntegerProgram, Point, ProgramAnswer
from remat.solvers.backends.scip import solve_with_scip

Backend = Callable[[MixedIntegerProgram, Limits, Point], ProgramAnswer]

BACKENDS: dict[str, Backend] = {
    "highs": solve_with_highs,
    "scip": solve_with_scip,
    "gurobi": solve_with_gurobi,
    "cplex": solve_with_cplex,
}
"""In order of preference."""

__all__ = ["BACKENDS", "Backend", "TooLarge", "get_backend"]


def get_backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UnknownName(f"There is no backend `{name}`; choose one of {', '.join(BACKENDS)}.")
    return BACKENDS[name]
