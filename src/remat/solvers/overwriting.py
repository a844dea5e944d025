"""Any solver, for problems whose ops may write into an input that nothing reads later.

In: a problem with `Op.overwrites`, and a solver that knows nothing of them. Out: a solution whose peak counts them. The
solver is first given the relaxation of `overwrite`, whose bound holds. Where its schedule needs more than supposed,
because it reads what should have been overwritten, the solver is asked again: with the ops that could not overwrite no
longer counted on, then for as much less memory as was missing, then without any overwriting. The portfolio goes on from
there: the smallest peak that is known may fit, and small graphs are settled for good by the shortest path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from remat.core.eager import without_overwrites
from remat.core.problem import LARGEST_BYTES, Problem, floor_bytes
from remat.core.schedule import Schedule
from remat.core.search.deadline import OutOfTime, within
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.solvers.base import NO_SCHEDULE_FITS, TOLERANCE, Progress, judge, nothing_fits
from remat.solvers.exact.shortest_path import shortest_schedule
from remat.solvers.schedule.overwrite import always_overwritten, has_overwrites, kept_from_overwriting
from remat.solvers.search.floor import lowest_schedule
from remat.solvers.search.incumbent import GRACE_S
from remat.solvers.wrapping import WrappingSolver

ROUNDS = 3
"""Attempts of each kind before the next kind has its turn."""
FIRST_SHARE, NEXT_SHARE = 0.8, 0.5
"""Of the time left, for the first attempt, which mostly does, and for each of the others."""
ATTEMPTS_GRACE_S = GRACE_S / 2
"""After the time limit, until an attempt is ended wherever it is; the rest is for the smallest peak that is known."""


@final
@dataclass(frozen=True, slots=True)
class Overwriting(WrappingSolver):
    """A solver whose schedules may count on overwriting."""

    goes_on: bool = False
    """Whether everything that Remat knows is tried where the solver fails: what is asked of the portfolio."""

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        if not has_overwrites(problem):
            return self.inner.solve(problem, limits, progress)
        countdown, relaxed = Countdown(limits), always_overwritten(problem)
        if self.goes_on and floor_bytes(relaxed)[0] > problem.budget_bytes:
            lowest = simulate(problem, lowest_schedule(problem))
            extra = lowest.time_ns - problem.base_time_ns
            return nothing_fits(problem, self.name, lowest.peak_bytes, NO_SCHEDULE_FITS, extra_ns=extra)

        def attempt(changed: Problem) -> Solution:
            share = FIRST_SHARE if changed is relaxed else NEXT_SHARE
            with within(countdown.left_s() + ATTEMPTS_GRACE_S):
                return self.inner.solve(changed, limits.within(share * countdown.left_s()), progress)

        first = attempt(relaxed)
        # A bound for less memory, or for less overwriting, than there is would prove too much.
        bound = first.bound_ns if first.schedule is not None else problem.base_time_ns
        best: Solution | None = None
        smallest = LARGEST_BYTES
        for found in self._attempts(problem, relaxed, first, attempt):
            peak = found.min_budget_bytes if found.schedule is None else _peak(problem, found.schedule)
            smallest = min(smallest, peak)
            if found.schedule is not None and peak <= problem.budget_bytes:
                best = _stated(found, peak, bound)
                break
        if self.goes_on:
            best, smallest = self._go_on(problem, best, smallest, limits.gap, countdown)
        return best if best is not None else _infeasible(first, smallest)

    def _attempts(
        self, problem: Problem, relaxed: Problem, first: Solution, attempt: Callable[[Problem], Solution]
    ) -> Iterator[Solution]:
        """Answers to the problem changed in several ways, of each of which the peak has to be found out.

        Answers without a schedule come only from where nothing is overwritten: what they need is enough in any case.
        """
        found, never, budget = first, frozenset[int](), problem.budget_bytes
        for _ in range(ROUNDS):
            if found.schedule is None:
                break
            yield found
            never |= kept_from_overwriting(problem, found.schedule)
            found = attempt(always_overwritten(problem, never))
        if found.schedule is not None:
            yield found
        found = first
        for round in range(ROUNDS - 1):
            if found.schedule is None:
                break
            budget -= (_peak(problem, found.schedule) - problem.budget_bytes) * 2**round
            found = attempt(relaxed.with_budget(budget))
            if found.schedule is not None:
                yield found
        yield attempt(without_overwrites(problem))

    def _go_on(
        self, problem: Problem, best: Solution | None, smallest: int, gap: float, countdown: Countdown
    ) -> tuple[Solution | None, int]:
        """The best answer and the smallest peak after everything else that is known was tried.

        An answer that is proven to be within the gap is not looked at again.
        """
        with suppress(OutOfTime):
            if best is None:
                lowest = judge(problem, lowest_schedule(problem), self.name)
                smallest = min(smallest, lowest.peak_bytes)
                best = lowest if lowest.schedule is not None else None
            if best is None or (best.gap > max(gap, TOLERANCE) and countdown.left_s() > 0):
                best = self._settled(problem, best)
        return best, smallest

    def _settled(self, problem: Problem, best: Solution | None) -> Solution | None:
        """The fastest answer there is, where the graph is small; else the best so far."""
        found = shortest_schedule(problem, float("inf") if best is None else best.time_ns - problem.base_time_ns)
        schedule = found.schedule if best is None else found.schedule or best.schedule
        if schedule is None or not found.complete:
            return best
        bound = simulate(problem, schedule).time_ns
        return judge(problem, schedule, self.name, bound_ns=bound, reason="No path through what fits is shorter.")


def _peak(problem: Problem, schedule: Schedule) -> int:
    return simulate(problem, schedule).peak_bytes


def _stated(found: Solution, peak_bytes: int, bound_ns: float) -> Solution:
    """The solution with its real peak and a bound that holds for the problem as it is."""
    bound = min(bound_ns, found.bound_ns)
    proven = found.status is not Status.OPTIMAL or bound >= found.bound_ns
    status = found.status if proven else Status.FEASIBLE
    return replace(found, status=status, peak_bytes=peak_bytes, min_budget_bytes=peak_bytes, bound_ns=bound)


def _infeasible(found: Solution, smallest: int) -> Solution:
    return replace(
        found,
        status=Status.INFEASIBLE,
        schedule=None,
        peak_bytes=smallest,
        min_budget_bytes=smallest,
        reason=found.reason if found.schedule is None else "No schedule that fits was found.",
    )
