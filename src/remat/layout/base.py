"""What every layout solver is, and how offsets become a `Placement`.

A solver takes a `LayoutProblem` and returns a `Placement`; its options are the fields of its class. `Quest` is what a
solver knows while it searches: the lowest placement, the proven bound, and whether to go on. `judge` is the one way
from offsets to a placement: it validates, so nothing that overlaps leaves a solver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from remat.layout.bounds import lower_bound
from remat.layout.problem import LayoutProblem, LayoutStatus, Placement
from remat.layout.validate import validate


@dataclass(frozen=True, slots=True)
class LayoutProgress:
    """What a solver knows while it is still searching."""

    elapsed_s: float
    height: int
    bound: int
    message: str


class LayoutSolver(Protocol):
    @property
    def name(self) -> str: ...

    def solve(
        self,
        problem: LayoutProblem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[LayoutProgress], None] | None = None,
    ) -> Placement: ...


class Quest:
    """The lowest placement so far, what is proven, and how much time is left."""

    def __init__(
        self,
        problem: LayoutProblem,
        solver: str,
        *,
        time_limit_s: float,
        progress: Callable[[LayoutProgress], None] | None = None,
        gap: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem, self.solver, self.bound = problem, solver, lower_bound(problem)
        self.gap = gap
        self.offsets = _stacked(problem)
        self.height = height_of(problem, self.offsets)
        self._clock, self._start, self._progress = clock, clock(), progress
        self._deadline = self._start + time_limit_s

    def left_s(self) -> float:
        return max(0.0, self._deadline - self._clock())

    @property
    def is_closed(self) -> bool:
        """Is nothing left to find? It fits or cannot fit; without a capacity, nothing is lower by more than the gap."""
        if self.problem.capacity is None:
            return self.height - self.bound <= self.gap * self.height
        return self.height <= self.problem.capacity or self.bound > self.problem.capacity

    def stop(self) -> bool:
        return self.is_closed or self.left_s() <= 0

    def offer(self, offsets: Sequence[int], source: str) -> bool:
        """Keep `offsets` if they are lower than everything before."""
        height = height_of(self.problem, offsets)
        if height >= self.height:
            return False
        self.offsets, self.height = tuple(offsets), height
        self._tell(source)
        return True

    def prove(self, bound: int, source: str) -> None:
        """No placement is lower than `bound`."""
        if bound > self.bound:
            self.bound = bound
            self._tell(source)

    def answer(self) -> Placement:
        return judge(self.problem, self.offsets, self.solver, bound=self.bound)

    def _tell(self, message: str) -> None:
        if self._progress is not None:
            self._progress(LayoutProgress(self._clock() - self._start, self.height, self.bound, message))


def judge(problem: LayoutProblem, offsets: Sequence[int], solver: str, *, bound: int) -> Placement:
    """The placement that `offsets` are; raises `InvalidLayout` where they overlap."""
    height = height_of(problem, offsets)
    if problem.fits(height):
        status = LayoutStatus.OPTIMAL if height <= bound else LayoutStatus.FEASIBLE
    else:
        status = LayoutStatus.OVER if problem.fits(bound) else LayoutStatus.INFEASIBLE
    placement = Placement(tuple(offsets), height, bound, status, solver)
    validate(problem, placement)
    return placement


def height_of(problem: LayoutProblem, offsets: Sequence[int]) -> int:
    return max((at + buffer.size for at, buffer in zip(offsets, problem.buffers, strict=True)), default=0)


def _stacked(problem: LayoutProblem) -> tuple[int, ...]:
    """Every buffer on top of the one before: an answer that needs no search."""
    offsets, top = [], 0
    for buffer in problem.buffers:
        top = -(-top // buffer.alignment) * buffer.alignment
        offsets.append(top)
        top += buffer.size
    return tuple(offsets)
