"""Addresses by constraint programming, on OR-Tools' CP-SAT.

In: a problem. Out: a placement with a bound. The model is in `no_overlap` and runs in a process of its own: OR-Tools
brings a HiGHS of its own, and one process cannot load both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

from remat.core.search.child_process import run_child
from remat.core.search.limits import Limits
from remat.errors import MissingExtra
from remat.layout.base import LayoutIncumbent, LayoutProgress
from remat.layout.packing.greedy import MANY_BUFFERS, offer_order
from remat.layout.packing.grid import Grid, make_grid
from remat.layout.packing.orders import Order
from remat.layout.packing.sections import find_sections
from remat.layout.problem import LayoutProblem, Placement

MAX_INTERVALS = 1_000_000
"""Sums over sections of the buffers in them; larger models take longer to build than they are worth."""


@final
@dataclass(frozen=True, slots=True)
class LayoutCpSat:
    name: str = "cp_sat"
    workers: int = 1
    """Threads; with more than one, two runs may differ."""

    def solve(
        self, problem: LayoutProblem, limits: Limits, progress: Callable[[LayoutProgress], None] | None = None
    ) -> Placement:
        incumbent = LayoutIncumbent(problem, self.name, limits, progress)
        for order in Order:
            offer_order(incumbent, order)
            if incumbent.left_s() <= 0 and len(problem.buffers) > MANY_BUFFERS:
                break
        self._search(incumbent)
        return incumbent.answer()

    def _search(self, incumbent: LayoutIncumbent) -> None:
        if find_spec("ortools") is None:
            raise MissingExtra("Placing buffers with CP-SAT needs ortools; install `remat[solvers]`.")
        if incumbent.stop():
            return
        sections = find_sections(incumbent.problem)
        if sum(end - first for first, end in zip(sections.first, sections.end, strict=True)) > MAX_INTERVALS:
            return
        grid = make_grid(incumbent.problem)
        content = run_child("remat.layout.packing.no_overlap", self._request(incumbent, grid), incumbent.left_s())
        if content is None:
            return
        found = json.loads(content)
        incumbent.raise_bound(found["bound"] * grid.unit, self.name)
        if found["offsets"] is not None:
            incumbent.offer([offset * grid.unit for offset in found["offsets"]], self.name)

    def _request(self, incumbent: LayoutIncumbent, grid: Grid) -> bytes:
        capacity = incumbent.problem.capacity
        fields = {
            "first": grid.first,
            "end": grid.end,
            "size": grid.size,
            "alignment": grid.alignment,
            "known": [offset // grid.unit for offset in incumbent.best],
            "bound": -(-incumbent.bound // grid.unit),
            "highest": (incumbent.value - 1 if capacity is None else capacity) // grid.unit,
            "minimize": capacity is None,
            "workers": self.workers,
            "seed": incumbent.limits.seed % 2**31,
            "time_limit_s": incumbent.left_s(),
        }
        return json.dumps(fields).encode()
