"""What exact solvers share: the way from a problem to a `Solution`.

In: a problem and limits. Out: the plain schedule where it fits; else what the search of an `ExactSolver` offers to its
incumbent, or the smallest peak known where that is nothing. Exact solvers go on until the best schedule is proven to be
optimal, whatever gap is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import OutOfTime
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.solvers.base import NO_SCHEDULE_FITS, TOLERANCE, Progress, judge, nothing_fits
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.search.floor import lowest_editable
from remat.solvers.search.incumbent import ScheduleIncumbent
from remat.solvers.search.start import quick_schedule

LOWEST_S = 2.0
"""How long to look for the smallest peak where nothing fits."""


class ExactSolver(ABC):
    """A solver that starts where the plain schedule does not fit, and proves what it can."""

    __slots__ = ()
    name: str

    @abstractmethod
    def search(self, incumbent: ScheduleIncumbent) -> str:
        """Offer schedules and raise the bound; returns why it stopped, as a sentence."""

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        plain = judge(problem, plain_schedule(problem.graph), self.name)
        if plain.status is not Status.INFEASIBLE:
            return plain
        incumbent = ScheduleIncumbent(problem, replace(limits, gap=TOLERANCE), progress)
        if floor_bytes(problem)[0] > problem.budget_bytes:
            incumbent.bound = float("inf")
        try:
            reason = self.search(incumbent) if incumbent.is_possible else ""
        except OutOfTime:
            reason = "Out of time."
        return _conclude(incumbent, self.name, reason)


def start_quickly(incumbent: ScheduleIncumbent) -> None:
    """Offer what quick strategies find."""
    offer_if_it_fits(incumbent, quick_schedule(incumbent.problem, incumbent.limits), "start")


def offer_if_it_fits(incumbent: ScheduleIncumbent, schedule: Schedule | None, source: str) -> bool:
    """Offer a schedule that was made; says whether it fits, be it the best or not."""
    if schedule is None:
        return False
    incumbent.offer_schedule(schedule, source)
    return simulate(incumbent.problem, schedule).peak_bytes <= incumbent.budget


def what_was_found(incumbent: ScheduleIncumbent) -> str:
    """The beginning of a reason, for a search that is complete within its limits."""
    return "Nothing fits" if incumbent.best is None else "The best"


def _conclude(incumbent: ScheduleIncumbent, solver: str, reason: str) -> Solution:
    problem = incumbent.problem
    if incumbent.best is not None:
        proven = incumbent.base_time + incumbent.bound if incumbent.bound > 0 else 0.0
        return judge(problem, incumbent.best, solver, bound_ns=proven, reason=reason)
    reason = reason if incumbent.is_possible else NO_SCHEDULE_FITS
    return nothing_fits(problem, solver, _smallest_peak(problem, incumbent.limits), reason)


def _smallest_peak(problem: Problem, limits: Limits) -> int:
    countdown = Countdown(limits.within(LOWEST_S))
    try:
        return lowest_editable(problem, lambda: countdown.left_s() <= 0).peak
    except OutOfTime:
        return EditableSchedule(problem).peak
