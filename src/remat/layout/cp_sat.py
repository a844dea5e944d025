"""Addresses by constraint programming, on OR-Tools' CP-SAT.

In: a problem. Out: a placement with a bound. The model is in `no_overlap` and runs in a process of its own: OR-Tools
brings a HiGHS of its own, and one process cannot load both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import final

from remat.errors import MissingExtra
from remat.layout.base import LayoutProgress, Quest
from remat.layout.greedy import fill
from remat.layout.grid import Grid, make_grid
from remat.layout.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement
from remat.solvers.child import run_child

MAX_INTERVALS = 1_000_000
"""Sums over sections of the buffers in them; larger models take longer to build than they are worth."""


@final
@dataclass(frozen=True, slots=True)
class LayoutCpSat:
    name: str = "cp_sat"
    workers: int = 1
    """Threads; with more than one, two runs may differ."""
    clock: Callable[[], float] = time.monotonic

    def solve(
        self,
        problem: LayoutProblem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[LayoutProgress], None] | None = None,
    ) -> Placement:
        quest = Quest(problem, self.name, time_limit_s=time_limit_s, progress=progress, clock=self.clock)
        for order in Order:
            quest.offer(fill(problem, arrange(problem, order)) or [], order.value)
        self._search(quest, seed)
        return quest.answer()

    def _search(self, quest: Quest, seed: int) -> None:
        if find_spec("ortools") is None:
            raise MissingExtra("Placing buffers with CP-SAT needs ortools; install `remat[solvers]`.")
        if quest.stop():
            return
        grid = make_grid(quest.problem)
        if sum(mask.bit_count() for mask in grid.covering) > MAX_INTERVALS:
            return
        content = run_child("remat.layout.no_overlap", self._request(quest, grid, seed), quest.left_s())
        if content is None:
            return
        found = json.loads(content)
        quest.prove(found["bound"] * grid.unit, self.name)
        if found["offsets"] is not None:
            quest.offer([offset * grid.unit for offset in found["offsets"]], self.name)

    def _request(self, quest: Quest, grid: Grid, seed: int) -> bytes:
        capacity = quest.problem.capacity
        fields = {
            "first": grid.first,
            "end": grid.end,
            "size": grid.size,
            "alignment": grid.alignment,
            "known": [offset // grid.unit for offset in quest.offsets],
            "bound": -(-quest.bound // grid.unit),
            "highest": (quest.height - 1 if capacity is None else capacity) // grid.unit,
            "minimize": capacity is None,
            "workers": self.workers,
            "seed": seed % 2**31,
            "time_limit_s": quest.left_s(),
        }
        return json.dumps(fields).encode()
