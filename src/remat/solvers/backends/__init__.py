"""Which library solves a mixed-integer program: HiGHS, SCIP, Gurobi or CPLEX, each where it is installed.

In: a `Program` and its `Limits`. Out: an `Answer`. Each library is imported inside the one function that calls it.
A library whose licence refuses a program of this size raises `TooLarge`.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.errors import UnknownName
from remat.solvers.backends.cplex import solve_with_cplex
from remat.solvers.backends.gurobi import solve_with_gurobi
from remat.solvers.backends.highs import solve_with_highs
from remat.solvers.backends.licence import TooLarge
from remat.solvers.backends.scip import solve_with_scip
from remat.solvers.program import Answer, Limits, Program

Backend = Callable[[Program, Limits], Answer]

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
