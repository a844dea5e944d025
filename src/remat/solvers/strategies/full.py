"""Keep only the inputs of each block and recompute the block when backward reaches it."""

from __future__ import annotations

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
class FullBlocks(Strategy):
    name: str = "full"
    has_one_schedule: ClassVar[bool] = True

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield keep_schedule(problem, kept_at(find_chain(problem), 1))
