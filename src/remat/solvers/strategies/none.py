"""Keep everything: the plain step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy


@final
@dataclass(frozen=True, slots=True)
class KeepAll(Strategy):
    name: str = "none"
    has_one_schedule: ClassVar[bool] = True

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
