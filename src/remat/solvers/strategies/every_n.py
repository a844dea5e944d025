"""Keep the input of every n-th block and recompute the blocks between (Chen et al. 2016); n is searched by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.blocks import find_chain, kept_at
from remat.solvers.schedule.keep import keep_schedule


@final
@dataclass(frozen=True, slots=True)
class EveryN(Strategy):
    name: str = "every_n"
    every: int | None = None

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        chain = find_chain(problem)
        for every in range(1, max(len(chain.cuts), 1) + 1) if self.every is None else (self.every,):
            yield keep_schedule(problem, kept_at(chain, every))
