"""Keep everything: the plain step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.solution import Solution
from remat.solvers.base import Progress, judge


@final
@dataclass(frozen=True, slots=True)
class KeepAll:
    name: str = "none"

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        return judge(problem, plain_schedule(problem.graph), self.name)
