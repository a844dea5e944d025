"""What a portfolio knows so far: its best schedule, its bound, and when to stop.

Phases take a `Run`, offer it tapes and bounds, and ask it whether to go on. It keeps a tape only if it fits the budget
and is faster than everything before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.base import Progress
from remat.solvers.evict import GROWTH, Taste, evict
from remat.solvers.prune import prune
from remat.solvers.tape import Tape, extra_keys

GRACE_S = 3.0
"""Beyond the time limit, where nothing fits yet."""


class Run:
    def __init__(
        self,
        problem: Problem,
        *,
        gap: float,
        time_limit_s: float,
        clock: Callable[[], float],
        progress: Callable[[Progress], None] | None,
        grace_s: float = GRACE_S,
    ) -> None:
        self.problem, self.budget, self.gap = problem, problem.budget_bytes, gap
        self.base_time = problem.base_time_ns
        self.best: tuple[int, ...] | None = None
        """The recomputations of the best tape; a schedule that no tape can hold may be better."""
        self.best_extra = float("inf")
        self._untaped: Schedule | None = None
        self.bound_extra = 0.0
        self.clock, self._start, self._progress = clock, clock(), progress
        self._deadline = self._start + time_limit_s
        self._grace_s = grace_s

    def left_s(self) -> float:
        return max(0.0, self._deadline - self.clock())

    def stop(self) -> bool:
        return self.left_s() <= 0 or self.closed()

    def overdue(self) -> bool:
        """Is even the grace over, in which to find a first schedule or the smallest budget?"""
        return self.clock() > self._deadline + self._grace_s

    def closed(self) -> bool:
        """Is the best schedule within the gap that was asked for, or every schedule proven impossible?"""
        if self.bound_extra == float("inf"):
            return True
        if not self.has_schedule():
            return False
        return self.best_extra - self.bound_extra <= self.gap * (self.base_time + self.best_extra)

    def has_schedule(self) -> bool:
        return self.best_extra < float("inf")

    def offer(self, tape: Tape, source: str) -> bool:
        """Keep the tape's schedule if it is the best so far."""
        if tape.peak > self.budget or tape.extra_time >= self.best_extra:
            return False
        self.best, self.best_extra, self._untaped = tuple(tape.extra_steps()), tape.extra_time, None
        self._tell(source)
        return True

    def offer_found(self, tape: Tape) -> bool:
        """Keep the tape's schedule if it is the best so far, as found by searching."""
        return self.offer(tape, "search")

    def offer_schedule(self, schedule: Schedule, source: str) -> bool:
        """Keep a schedule of any form if it is the best so far."""
        timeline = simulate(self.problem, schedule)
        extra = timeline.time_ns - self.base_time
        if timeline.peak_bytes > self.budget or extra >= self.best_extra:
            return False
        keys = extra_keys(schedule, len(self.problem.graph.ops))
        if keys is not None:
            return self.offer(self.tape(keys), source)
        self.best_extra, self._untaped = extra, schedule
        self._tell(source)
        return True

    def fit(self, tape: Tape, taste: Taste, source: str) -> bool:
        """Make the tape fit and offer it; stops at the time limit."""
        limit = GROWTH * tape.shape.count
        fits = evict(tape, self.budget, taste, stop=lambda: self.left_s() <= 0, max_steps=limit)
        if fits:
            prune(tape, self.budget)
        return self.offer(tape, source) or fits

    def raise_bound(self, extra_time: float, source: str) -> None:
        """Every schedule within the budget recomputes for at least `extra_time`."""
        if extra_time > self.bound_extra:
            self.bound_extra = extra_time
            self._tell(source)

    def tape(self, steps: Sequence[int] = ()) -> Tape:
        """A tape of the plain schedule with `steps` added."""
        tape = Tape(self.problem)
        for key in steps:
            tape.insert(key)
        return tape

    def schedule(self) -> Schedule | None:
        if self._untaped is not None or self.best is None:
            return self._untaped
        return self.tape(self.best).schedule()

    def _tell(self, message: str) -> None:
        if self._progress is not None:
            elapsed = self.clock() - self._start
            best, bound = self.base_time + self.best_extra, self.base_time + self.bound_extra
            self._progress(Progress(elapsed, best, bound, message))
