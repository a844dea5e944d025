"""Any solver, for problems whose values may spend a while on the host: keep, compute again or copy, decided together.

In: a problem with copies (`core/copies.py`), and a solver that knows nothing of them. Out: a solution that uses them.
The solver is asked for schedules without copies, of this budget and of larger ones; each is made to fit by copies
(`schedule/to_host.py`), and the fastest stays. The one of this budget needs none, so that the answer is never slower
than without copies.

**The bound.** Take any schedule with copies that is as fast as the best one known, of time T. Let values stay in memory
where it has them on the host: what is left is a schedule without copies of at most its time, and of at most its memory
and what is on the host at once. All that is on the host at some moment t was copied out before and is copied back after
it, so it is at most `min(out * t, back * (T - t))` bytes, and at most `T * out * back / (out + back)` whenever that is,
where `out` and `back` are the most bytes that any copy moves in a nanosecond. So no schedule with copies within a
budget B is faster than the bound, without copies, for B and that much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from remat.core.copies import has_copies, movable_of, without_copies
from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.solvers.base import TOLERANCE, Progress, Solver
from remat.solvers.schedule.to_host import fit_by_copies
from remat.solvers.wrapping import WrappingSolver

SHARES = (1.0, 0.5, 0.75, 0.25, 0.88, 0.62, 0.38, 0.12)
"""Of what can be on the host at once: by so much budgets are larger for which the solvers are asked, in this order."""
FIRST_SHARE = 0.3
"""Of the time: for a schedule without copies, and for the bound."""
LEAST_S = 0.05
HALVINGS = 12
"""How often the interval is halved in which the smallest budget lies that copies can meet."""


@final
@dataclass(frozen=True, slots=True)
class Offloading(WrappingSolver):
    """A solver whose schedules may have values on the host."""

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        if not has_copies(problem.graph):
            return self.inner.solve(problem, limits, progress)
        search = _Search(problem, self.inner, limits, progress)
        search.without_copies()
        if not search.is_done():
            search.with_copies()
        return search.answer()


class _Search:
    def __init__(
        self, problem: Problem, inner: Solver, limits: Limits, progress: Callable[[Progress], None] | None
    ) -> None:
        self.problem, self.plain = problem, without_copies(problem)
        self.inner, self.progress = inner, progress
        self.limits, self.countdown = limits, Countdown(limits)
        self.best: Solution | None = None
        self.refused: Solution | None = None
        self.bound_ns = problem.base_time_ns

    def is_done(self) -> bool:
        return self.best is not None and self.best.time_ns <= self.bound_ns * (1 + self.limits.gap)

    def without_copies(self) -> None:
        found = self.inner.solve(self.plain, self.limits.within(FIRST_SHARE * self.limits.time_limit_s), self.progress)
        self._note(found)
        self.best = found if found.schedule is not None else None

    def _note(self, found: Solution) -> None:
        if found.schedule is None and self.refused is None:
            self.refused = found

    def with_copies(self) -> None:
        most = self._most_away(self._known_time())
        # The bound needs a time that a schedule is known to reach.
        is_known = self.best is not None
        self._fit(plain_schedule(self.plain.graph))
        for share in SHARES:
            if self.best is not None and (self.is_done() or self.countdown.left_s() <= 0):
                return
            self._try(self.problem.budget_bytes + int(share * most), is_bound=share == 1.0 and is_known)

    def _known_time(self) -> float:
        """Of a schedule that fits, or of one that is hardly worth a try."""
        return self.best.time_ns if self.best is not None else 2 * self.problem.base_time_ns

    def _most_away(self, time_ns: float) -> int:
        """What can be on the host at once in a step of that time."""
        sizes = self.problem.costs.size_bytes
        all_bytes, host = sum(sizes), self.problem.host_budget_bytes
        rates = [(item.out_ns, item.back_ns, sizes[item.value]) for item in movable_of(self.problem)]
        if any(min(out, back) * LARGEST_BYTES <= size for out, back, size in rates):
            return min(all_bytes, host)
        out, back = max(size / out for out, _, size in rates), max(size / back for _, back, size in rates)
        at_once = min(float(LARGEST_BYTES), time_ns * out * back / (out + back)) if out + back else 0
        return min(host, int(at_once) + 1, all_bytes)

    def _try(self, budget_bytes: int, *, is_bound: bool) -> None:
        """Ask for a schedule of that budget, and let copies bring it within the one there is."""
        share = FIRST_SHARE if is_bound else (1 - 2 * FIRST_SHARE) / (len(SHARES) - 1)
        left = max(LEAST_S, min(share * self.limits.time_limit_s, self.countdown.left_s()))
        larger = self.plain.with_budget(min(LARGEST_BYTES, budget_bytes))
        roomier = self.inner.solve(larger, self.limits.within(left), None)
        self._note(roomier)
        if roomier.schedule is None:
            return
        if is_bound:
            self.bound_ns = max(self.bound_ns, roomier.bound_ns)
        self._fit(roomier.schedule)

    def _fit(self, schedule: Schedule) -> None:
        steps = fit_by_copies(self.problem, schedule)
        if steps is None:
            return
        time_ns = simulate(self.problem, steps).time_ns
        if self.best is not None and time_ns >= self.best.time_ns:
            return
        peak = validate(self.problem, steps, keep_order=False)
        name, reason = self.inner.name, "Values are copied to the host."
        self.best = Solution(Status.FEASIBLE, steps, time_ns, peak, self.bound_ns, peak, name, reason)
        if self.progress is not None:
            elapsed = self.countdown.elapsed_s()
            self.progress(Progress(elapsed, time_ns, self.bound_ns, f"{self.inner.name}, with copies"))

    def answer(self) -> Solution:
        """The best, with the bound that holds for schedules with copies; else the smallest budget that is known."""
        if self.best is None:
            assert self.refused is not None, "what was not found was refused"
            least = min(self.refused.min_budget_bytes, self._least_budget(self.refused.min_budget_bytes))
            return replace(self.refused, min_budget_bytes=least, peak_bytes=least)
        bound = min(self.bound_ns, self.best.time_ns)
        is_best = self.best.time_ns - bound <= TOLERANCE * self.best.time_ns
        return replace(self.best, bound_ns=bound, status=Status.OPTIMAL if is_best else Status.FEASIBLE)

    def _least_budget(self, enough: int) -> int:
        """The smallest budget within which copies bring the step as it is, above the one asked for."""
        plain, low = plain_schedule(self.plain.graph), self.problem.budget_bytes
        for _ in range(HALVINGS):
            middle = (low + enough) // 2
            steps = fit_by_copies(self.problem.with_budget(middle), plain)
            low, enough = (middle, enough) if steps is None else (low, middle)
        return enough
