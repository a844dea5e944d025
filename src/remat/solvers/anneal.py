"""Simulated annealing over keep-sets: change a few activations, accept what is worse less and less often.

Starts from the best of the strategies' keep-sets. Tries are counted, so that a seed gives one answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.keep_search import Field


@final
@dataclass(frozen=True, slots=True)
class Anneal(Strategy):
    name: str = "anneal"
    hot: float = 0.02
    """Share of the step's time that a change may lose at first, with probability 1/e."""
    cold: float = 0.0002
    every: int = 20
    """Rounds between looks at the clock."""

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        field, rng = Field(problem), random.Random(seed)
        for _ in field.starts():
            yield field.schedule(field.best)
        current = field.best
        for number in range(field.rounds if field.ops else 0):
            if field.left <= 0:
                break
            heat = self.hot * (self.cold / self.hot) ** (number / field.rounds)
            changed = field.flip(current, rng)
            worse = field.weigh(changed) - field.weigh(current)
            if worse <= 0 or rng.random() < math.exp(-worse / heat):
                current = changed
            if number % self.every == 0:
                yield field.schedule(field.best)
        yield field.schedule(field.best)
