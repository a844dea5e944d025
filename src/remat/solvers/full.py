"""Keep only the inputs of each block and recompute the block when backward reaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.solution import Solution
from remat.solvers.base import Progress, judge
from remat.solvers.blocks import find_chain, kept_at
from remat.solvers.keep import keep_schedule


@final
@dataclass(frozen=True, slots=True)
class FullBlocks:
    name: str = "full"

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        kept = kept_at(find_chain(problem), 1)
        return judge(problem, keep_schedule(problem, kept), self.name)
