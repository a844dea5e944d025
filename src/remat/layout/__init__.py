"""Addresses ahead of time: lifetimes in, an offset for each buffer out.

`place` is the arrow from a `LayoutProblem` to a `Placement`. A new solver is one file and one line in `REGISTRY`.
Whatever a solver returns is checked by `validate`, which shares no code with any of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from remat.core.search.limits import Limits
from remat.errors import UnknownName
from remat.layout.auto import LayoutAuto
from remat.layout.base import LayoutProgress, LayoutSolver
from remat.layout.bounds import load, lower_bound
from remat.layout.liveness import lifetimes
from remat.layout.packing.cp_sat import LayoutCpSat
from remat.layout.packing.exact import LayoutExact
from remat.layout.packing.greedy import Greedy
from remat.layout.packing.local_search import LocalSearch
from remat.layout.packing.orders import Order
from remat.layout.problem import Buffer, LayoutProblem, LayoutStatus, Placement
from remat.layout.sharing import Sharing, share_by_tags
from remat.layout.sharing_exact import share_exactly
from remat.layout.storages import Storages, storages_of
from remat.layout.validate import validate

REGISTRY: tuple[LayoutSolver, ...] = (
    LayoutAuto(),
    LayoutExact(),
    LocalSearch(),
    Greedy("size", Order.SIZE),
    Greedy("area", Order.AREA),
    Greedy("load", Order.LOAD),
    Greedy("lifetime", Order.LIFE),
    Greedy("best_fit", Order.SIZE, tightest=True),
    Greedy("first_fit", Order.START),
    LayoutCpSat(),
)
"""In order of preference."""

DEFAULT_TIME_LIMIT_S = 60.0
CHECK_S = 2e-5
"""Seconds kept back for each buffer, in which the answer is checked and written."""

__all__ = [
    "DEFAULT_TIME_LIMIT_S",
    "REGISTRY",
    "Buffer",
    "LayoutAuto",
    "LayoutProblem",
    "LayoutProgress",
    "LayoutSolver",
    "LayoutStatus",
    "Placement",
    "Sharing",
    "Storages",
    "get_solver",
    "lifetimes",
    "load",
    "lower_bound",
    "place",
    "share_by_tags",
    "share_exactly",
    "storages_of",
    "validate",
]


def get_solver(name: str) -> LayoutSolver:
    """The layout solver called `name`."""
    for solver in REGISTRY:
        if solver.name == name:
            return solver
    names = [solver.name for solver in REGISTRY]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(names)}."
    raise UnknownName(f"No layout solver is called {name!r}; {hint}")


def place(
    problem: LayoutProblem,
    solver: LayoutSolver | str = "auto",
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    seed: int = 0,
    progress: Callable[[LayoutProgress], None] | None = None,
) -> Placement:
    """Give every buffer an offset; the placement says whether it fits and what was proven."""
    chosen = get_solver(solver) if isinstance(solver, str) else solver
    limits = Limits(max(0.0, time_limit_s - CHECK_S * len(problem.buffers)), gap=0.0, seed=seed)
    placement = chosen.solve(problem, limits, progress)
    validate(problem, placement)
    return placement
