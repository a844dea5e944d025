"""Cut a chain of n blocks into √n equal segments and keep only their inputs (Chen et al. 2016)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.blocks import find_chain, kept_at
from remat.solvers.schedule.keep import keep_schedule


@final
@dataclass(frozen=True, slots=True)
class SqrtN(Strategy):
    name: str = "sqrt_n"
    has_one_schedule: ClassVar[bool] = True

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        chain = find_chain(problem)
        yield keep_schedule(problem, kept_at(chain, max(1, math.isqrt(len(chain.cuts)))))
