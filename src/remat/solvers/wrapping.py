"""A solver around another: the same name, and the problem, the limits or the answer changed on the way.

In: the inner solver. Out: a solver. A subclass states what it changes; time that it shares out between several solves
of the inner one is counted by a `Countdown` of its own limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from remat.core.problem import Problem
from remat.core.search.limits import Limits
from remat.core.solution import Solution
from remat.solvers.base import Progress, Solver


@dataclass(frozen=True, slots=True)
class WrappingSolver(ABC):
    inner: Solver

    @property
    def name(self) -> str:
        return self.inner.name

    @abstractmethod
    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        """What the inner solver answers, with this wrapper's change."""
