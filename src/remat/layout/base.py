"""What every layout solver is, and how offsets become a `Placement`.

A solver takes a `LayoutProblem` and returns a `Placement`; its options are the fields of its class. `judge` is the one
way from offsets to a placement, `place` validates what any solver returns, and `LayoutIncumbent` is the lowest
placement of a search so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from remat.core.search.incumbent import Incumbent
from remat.core.search.limits import Limits
from remat.layout.bounds import lower_bound
from remat.layout.problem import LayoutProblem, LayoutStatus, Placement


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
        self, problem: LayoutProblem, limits: Limits, progress: Callable[[LayoutProgress], None] | None = None
    ) -> Placement: ...


class LayoutIncumbent(Incumbent[tuple[int, ...], int]):
    """Offsets and their height; to begin with, those of all buffers on top of each other."""

    def __init__(
        self,
        problem: LayoutProblem,
        solver: str,
        limits: Limits,
        progress: Callable[[LayoutProgress], None] | None = None,
    ) -> None:
        stacked = _stacked(problem)
        super().__init__(limits, stacked, height_of(problem, stacked), lower_bound(problem))
        self.problem, self.solver, self._progress = problem, solver, progress
        self.has_placement = False
        """Whether anything was offered that is lower than all buffers on top of each other."""

    @property
    def is_closed(self) -> bool:
        """Is nothing left to find? It fits or cannot fit; without a capacity, nothing is lower by more than the gap."""
        if self.problem.capacity is None:
            return self.value - self.bound <= self.limits.gap * self.value
        return self.value <= self.problem.capacity or self.bound > self.problem.capacity

    def offer(self, offsets: Sequence[int], source: str) -> bool:
        """Keep `offsets` if they are lower than everything before."""
        is_lower = self.keep(tuple(offsets), height_of(self.problem, offsets), source)
        self.has_placement |= is_lower
        return is_lower

    def answer(self) -> Placement:
        return judge(self.problem, self.best, self.solver, bound=self.bound)

    def tell(self, source: str) -> None:
        if self._progress is not None:
            self._progress(LayoutProgress(self.countdown.elapsed_s(), self.value, self.bound, source))


def judge(problem: LayoutProblem, offsets: Sequence[int], solver: str, *, bound: int) -> Placement:
    """The placement that `offsets` are."""
    height = height_of(problem, offsets)
    if problem.fits(height):
        status = LayoutStatus.OPTIMAL if height <= bound else LayoutStatus.FEASIBLE
    else:
        status = LayoutStatus.OVER if problem.fits(bound) else LayoutStatus.INFEASIBLE
    return Placement(tuple(offsets), height, bound, status, solver)


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
