"""Keep, compute again or copy to the host, decided together.

In: a problem, and how fast values move between device and host. Out: a problem with copies, and a schedule of it. The
solvers are asked for schedules without copies, of this budget and of larger ones; each is made to fit by copies
(`schedule/to_host.py`), and the fastest stays. The one of this budget needs none, so that the answer is never slower
than without copies.

**The bound.** Take any schedule with copies that is as fast as the best one known, of time T. Let values stay in memory
where it has them on the host: what is left is a schedule without copies of at most its time, and of at most its memory
and what is on the host at once. All that is on the host at some moment t was copied out before and is copied back after
it, so it is at most `min(out * t, back * (T - t))` bytes, and at most `T * out * back / (out + back)` whenever that is.
So no schedule with copies within a budget B is faster than the bound, without copies, for B and that much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from remat.core.copies import Link, WithCopies, with_copies
from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.schedule import Schedule
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.errors import InfeasibleBudget
from remat.solvers.base import TOLERANCE
from remat.solvers.schedule.to_host import fit_by_copies

SHARES = (1.0, 0.5, 0.75, 0.25, 0.88, 0.62, 0.38, 0.12)
"""Of what can be on the host at once: by so much budgets are larger for which the solvers are asked, in this order."""
FIRST_SHARE = 0.3
"""Of the time: for a schedule without copies, and for the bound."""
LEAST_S = 0.05

Solve = Callable[[Problem, float], Solution]
"""The fastest schedule without copies within so many seconds; raises `InfeasibleBudget`."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    made: WithCopies
    solution: Solution


def offload(problem: Problem, link: Link, solve: Solve, limits: Limits) -> Offloaded:
    """See the module's docstring; raises `InfeasibleBudget` where nothing fits with copies either."""
    search = _Search(problem, link, solve, limits)
    search.without_copies()
    if not search.is_done():
        search.with_copies()
    if search.best is None:
        assert search.refused is not None
        raise search.refused
    return replace(search.best, solution=search.proven(search.best.solution))


class _Search:
    def __init__(self, problem: Problem, link: Link, solve: Solve, limits: Limits) -> None:
        self.problem, self.link, self.solve = problem, link, solve
        self.limits, self.countdown = limits, Countdown(limits)
        self.best: Offloaded | None = None
        self.refused: InfeasibleBudget | None = None
        self.bound_ns = problem.base_time_ns

    def is_done(self) -> bool:
        return self.best is not None and self.best.solution.time_ns <= self.bound_ns * (1 + self.limits.gap)

    def without_copies(self) -> None:
        try:
            solution = self.solve(self.problem, FIRST_SHARE * self.limits.time_limit_s)
        except InfeasibleBudget as error:
            self.refused = error
        else:
            self.best = Offloaded(with_copies(self.problem, (), self.link), solution)

    def with_copies(self) -> None:
        most = self._most_away(self._known_time())
        for share in SHARES:
            if self.best is not None and (self.is_done() or self.countdown.left_s() <= 0):
                return
            self._try(self.problem.budget_bytes + int(share * most), is_bound=share == 1.0)

    def _known_time(self) -> float:
        """Of a schedule that fits, or of one that is hardly worth a try."""
        return self.best.solution.time_ns if self.best is not None else 2 * self.problem.base_time_ns

    def _most_away(self, time_ns: float) -> int:
        """What can be on the host at once in a step of that time."""
        out, back = self.link.out_bytes_per_ns, self.link.back_bytes_per_ns
        at_once = min(float(LARGEST_BYTES), time_ns * out * back / (out + back))
        return min(self.problem.host_budget_bytes, int(at_once) + 1, sum(self.problem.costs.size_bytes))

    def _try(self, budget_bytes: int, *, is_bound: bool) -> None:
        """Ask for a schedule of that budget, and let copies bring it within the one there is."""
        share = FIRST_SHARE if is_bound else (1 - 2 * FIRST_SHARE) / (len(SHARES) - 1)
        left = max(LEAST_S, min(share * self.limits.time_limit_s, self.countdown.left_s()))
        try:
            roomier = self.solve(self.problem.with_budget(min(LARGEST_BYTES, budget_bytes)), left)
        except InfeasibleBudget as error:
            if self.refused is None:
                self.refused = error
            return
        if is_bound and self.best is not None:
            self.bound_ns = max(self.bound_ns, roomier.bound_ns)
        assert roomier.schedule is not None
        self._fit(roomier.schedule)

    def _fit(self, schedule: Schedule) -> None:
        found = fit_by_copies(self.problem, schedule, self.link)
        if found is None:
            return
        made, steps = found
        timeline = simulate(made.problem, steps)
        if self.best is not None and timeline.time_ns >= self.best.solution.time_ns:
            return
        peak = validate(made.problem, steps)
        self.best = Offloaded(
            made,
            Solution(Status.FEASIBLE, steps, timeline.time_ns, peak, self.bound_ns, peak, "auto", "With copies."),
        )

    def proven(self, solution: Solution) -> Solution:
        """With the bound that holds for schedules with copies."""
        bound = min(self.bound_ns, solution.time_ns)
        is_best = solution.time_ns - bound <= TOLERANCE * solution.time_ns
        return replace(solution, bound_ns=bound, status=Status.OPTIMAL if is_best else Status.FEASIBLE)
