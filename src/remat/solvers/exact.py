"""What exact solvers share: the way from a problem to a `Solution`, and what is known on that way.

An `ExactSolver` states only its search. `Exact` is the best schedule so far, the bound, and how much time is left;
where `Run` holds tapes, it holds any schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.solvers.base import TOLERANCE, Progress, judge
from remat.solvers.floor import lowest_tape
from remat.solvers.start import quick_schedule

LOWEST_S = 2.0
"""How long to look for the smallest peak where nothing fits."""


class ExactSolver(ABC):
    """A solver that starts where the plain schedule does not fit, and proves what it can."""

    __slots__ = ()
    name: str
    clock: Callable[[], float]

    @abstractmethod
    def search(self, found: Exact, seed: int) -> str:
        """Offer schedules and raise the bound; returns why it stopped, as a sentence."""

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        plain = judge(problem, plain_schedule(problem.graph), self.name)
        if plain.status is not Status.INFEASIBLE:
            return plain
        found = Exact(problem, time_limit_s=time_limit_s, clock=self.clock, progress=progress)
        return found.conclude(self.name, self.search(found, seed) if found.is_possible else "")


class Exact:
    def __init__(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        clock: Callable[[], float],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.problem = problem
        self.best: Schedule | None = None
        self.time = float("inf")
        self.bound = problem.base_time_ns
        self._clock, self._start, self._progress = clock, clock(), progress
        self._deadline = self._start + time_limit_s

    def left_s(self) -> float:
        return max(0.0, self._deadline - self._clock())

    @property
    def is_possible(self) -> bool:
        """Could there be a schedule that fits, as far as is known?"""
        return self.bound < float("inf") and floor_bytes(self.problem)[0] <= self.problem.budget_bytes

    @property
    def is_closed(self) -> bool:
        """Is the best schedule proven optimal, or every schedule impossible?"""
        return not self.is_possible or (self.best is not None and self.time - self.bound <= TOLERANCE * self.time)

    @property
    def what(self) -> str:
        """The beginning of a reason, for a search that is complete within its limits."""
        return "Nothing fits" if self.best is None else "The best"

    def offer(self, schedule: Schedule | None, source: str) -> bool:
        """Keep a schedule that fits and is the best so far; says whether it fits."""
        if schedule is None:
            return False
        timeline = simulate(self.problem, schedule)
        if timeline.peak_bytes > self.problem.budget_bytes:
            return False
        if timeline.time_ns < self.time:
            self.best, self.time = schedule, timeline.time_ns
            self._tell(source)
        return True

    def start_quickly(self, seed: int) -> None:
        """Offer what quick strategies find."""
        self.offer(quick_schedule(self.problem, clock=self._clock, seed=seed), "start")

    def raise_bound(self, time_ns: float, source: str) -> None:
        """No schedule within the budget is faster than `time_ns`."""
        if time_ns > self.bound:
            self.bound = time_ns
            self._tell(source)

    def conclude(self, solver: str, reason: str) -> Solution:
        if self.best is not None:
            return judge(self.problem, self.best, solver, bound_ns=self.bound, reason=reason)
        until = self._clock() + LOWEST_S
        smallest = lowest_tape(self.problem, lambda: self._clock() > until).peak
        return Solution(
            status=Status.INFEASIBLE,
            schedule=None,
            time_ns=self.problem.base_time_ns,
            peak_bytes=smallest,
            bound_ns=self.problem.base_time_ns,
            min_budget_bytes=smallest,
            solver=solver,
            reason=reason if self.is_possible else "No schedule fits this budget.",
        )

    def _tell(self, message: str) -> None:
        if self._progress is not None:
            self._progress(Progress(self._clock() - self._start, self.time, self.bound, message))
