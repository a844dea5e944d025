"""The best schedule so far, how much recomputation is proven to be needed, and when to stop.

In: a problem and its limits; then schedules, editable or of any form, and bounds, offered by the phases of a solver.
Out: the fastest schedule that fits. Values are the time of recomputation, beyond that of running every op once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.incumbent import Incumbent
from remat.core.search.limits import Limits
from remat.core.simulate import Timeline, simulate
from remat.solvers.base import Progress
from remat.solvers.schedule.editable import EditableSchedule, extra_keys
from remat.solvers.schedule.evict import MAX_GROWTH_FACTOR, EvictionRule, evict
from remat.solvers.schedule.prune import prune

GRACE_S = 3.0
"""Beyond the time limit, where nothing fits yet."""


class ScheduleIncumbent(Incumbent[Schedule | None, float]):
    def __init__(
        self,
        problem: Problem,
        limits: Limits,
        progress: Callable[[Progress], None] | None = None,
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        super().__init__(limits, None, float("inf"), 0.0)
        self.problem, self.budget = problem, problem.budget_bytes
        self.base_time = problem.base_time_ns
        self.best_steps: tuple[int, ...] | None = None
        """The recomputations of the best editable schedule; one of another form may be better."""
        self.lowest_peak = 2**63
        """Of everything offered, whether it fits or not."""
        self._progress, self._grace_s = progress, grace_s

    def is_overdue(self) -> bool:
        """Is even the grace over, in which to find a first schedule or the smallest budget?"""
        return self.countdown.is_over_by(self._grace_s)

    @property
    def is_closed(self) -> bool:
        """Is the best schedule within the gap that was asked for, or every schedule proven impossible?"""
        if not self.is_possible:
            return True
        if self.best is None:
            return False
        return self.value - self.bound <= self.limits.gap * (self.base_time + self.value)

    @property
    def is_possible(self) -> bool:
        """Could there be a schedule that fits, as far as is proven?"""
        return self.bound < float("inf")

    def offer(self, editable: EditableSchedule, source: str) -> bool:
        """Keep it if it is the best so far."""
        self.lowest_peak = min(self.lowest_peak, editable.peak)
        if editable.peak > self.budget or editable.extra_time >= self.value:
            return False
        self.best_steps = tuple(editable.extra_steps())
        return self.keep(editable.schedule(), editable.extra_time, source)

    def offer_found(self, editable: EditableSchedule) -> bool:
        """Keep it if it is the best so far, as found by searching."""
        return self.offer(editable, "search")

    def offer_schedule(self, schedule: Schedule, source: str, timeline: Timeline | None = None) -> bool:
        """Keep a schedule of any form if it is the best so far; `timeline` where it was simulated already."""
        timeline = simulate(self.problem, schedule) if timeline is None else timeline
        self.lowest_peak = min(self.lowest_peak, timeline.peak_bytes)
        extra = timeline.time_ns - self.base_time
        if timeline.peak_bytes > self.budget or extra >= self.value:
            return False
        keys = extra_keys(schedule, len(self.problem.graph.ops))
        self.best_steps = tuple(keys) if keys is not None else self.best_steps
        return self.keep(schedule, extra, source)

    def fit(self, editable: EditableSchedule, rule: EvictionRule, source: str) -> bool:
        """Make the schedule fit and offer it; stops at the time limit."""
        limit = MAX_GROWTH_FACTOR * editable.flat.count
        fits = evict(editable, self.budget, rule, stop=lambda: self.left_s() <= 0, max_steps=limit)
        if fits:
            prune(editable, self.budget)
        return self.offer(editable, source) or fits

    def editable(self, steps: Sequence[int] = ()) -> EditableSchedule:
        """The plain schedule with `steps` added, to be edited."""
        return EditableSchedule(self.problem, steps)

    def tell(self, source: str) -> None:
        if self._progress is not None:
            best, bound = self.base_time + self.value, self.base_time + self.bound
            self._progress(Progress(self.countdown.elapsed_s(), best, bound, source))
