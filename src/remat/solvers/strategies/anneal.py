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
from remat.solvers.strategies.keep_search import KeepSetSearch


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
        search, rng = KeepSetSearch(problem), random.Random(seed)
        for _ in search.starts():
            yield search.schedule(search.best)
        current = search.best
        for number in range(search.rounds if search.ops else 0):
            if search.left <= 0:
                break
            heat = self.hot * (self.cold / self.hot) ** (number / search.rounds)
            changed = search.flip(current, rng)
            worse = search.weigh(changed) - search.weigh(current)
            if worse <= 0 or rng.random() < math.exp(-worse / heat):
                current = changed
            if number % self.every == 0:
                yield search.schedule(search.best)
        yield search.schedule(search.best)
