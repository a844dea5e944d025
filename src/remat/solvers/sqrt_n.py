"""Cut a chain of n blocks into √n equal segments and keep only their inputs (Chen et al. 2016)."""

from __future__ import annotations

import math
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
class SqrtN:
    name: str = "sqrt_n"

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        chain = find_chain(problem)
        kept = kept_at(chain, max(1, math.isqrt(len(chain.cuts))))
        return judge(problem, keep_schedule(problem, kept), self.name)
