"""What every solver is, and how a schedule becomes a `Solution`.

A solver takes a `Problem` and returns a `Solution`; its options are the fields of its class. `judge` is the one way
from steps to a solution: it validates, so nothing invalid leaves a solver. A `Strategy` only proposes schedules, one
after another; what fits, what is fastest and when to stop is decided here for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from remat.core.budget import format_bytes
from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import OutOfTime
from remat.core.search.limits import Countdown, Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.errors import InfeasibleBudget

NO_SCHEDULE_FITS = "No schedule fits this budget."
TOLERANCE = 1e-6
"""Relative distance between time and bound below which a schedule counts as optimal."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a solver knows while it is still searching; `time_ns` is infinite before the first schedule."""

    elapsed_s: float
    time_ns: float
    bound_ns: float
    message: str


class Solver(Protocol):
    @property
    def name(self) -> str: ...

    def solve(
        self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None
    ) -> Solution: ...


def judge(problem: Problem, schedule: Schedule, solver: str, *, bound_ns: float = 0.0, reason: str = "") -> Solution:
    """The solution that `schedule` is: OPTIMAL or FEASIBLE, or INFEASIBLE with its peak as the smallest budget."""
    timeline = simulate(problem, schedule)
    bound = min(max(bound_ns, problem.base_time_ns), timeline.time_ns)
    fits = timeline.peak_bytes <= problem.budget_bytes
    if fits:
        validate(problem, schedule)
    optimal = timeline.time_ns - bound <= TOLERANCE * timeline.time_ns
    return Solution(
        status=(Status.OPTIMAL if optimal else Status.FEASIBLE) if fits else Status.INFEASIBLE,
        schedule=schedule if fits else None,
        time_ns=timeline.time_ns,
        peak_bytes=timeline.peak_bytes,
        bound_ns=bound,
        min_budget_bytes=timeline.peak_bytes,
        solver=solver,
        reason=reason or _reason(problem, timeline.peak_bytes),
    )


def nothing_fits(problem: Problem, solver: str, smallest: int, reason: str, *, extra_ns: float = 0.0) -> Solution:
    """The solution where no schedule was found: the smallest peak that is known, and the extra time that it takes."""
    return Solution(
        status=Status.INFEASIBLE,
        schedule=None,
        time_ns=problem.base_time_ns + extra_ns,
        peak_bytes=smallest,
        bound_ns=problem.base_time_ns,
        min_budget_bytes=smallest,
        solver=solver,
        reason=reason,
    )


@runtime_checkable
class MovesValues(Protocol):
    """A solver that chooses copies to the host by itself."""

    def schedules_with_copies(
        self, problem: Problem, limits: Limits, raise_bound: Callable[[float], None]
    ) -> Iterable[Schedule]:
        """Valid schedules of a problem with copies, made one by one; `raise_bound` is told what none of them beats."""
        ...


class Strategy(ABC):
    """A solver that proposes schedules; its answer is the fastest that fits, or else the one with the smallest peak."""

    __slots__ = ()
    name: str
    has_one_schedule: ClassVar[bool] = False
    """Whether it proposes one schedule, the same for every budget."""

    @abstractmethod
    def schedules(self, problem: Problem, seed: int) -> Iterable[Schedule]:
        """At least one valid schedule, made one by one: those after the time limit are never asked for."""

    def solve(self, problem: Problem, limits: Limits, progress: Callable[[Progress], None] | None = None) -> Solution:
        return best_of(problem, self.schedules(problem, limits.seed), self.name, limits, progress)


def best_of(
    problem: Problem,
    schedules: Iterable[Schedule],
    solver: str,
    limits: Limits,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The fastest of the schedules that fit, or the one with the smallest peak; ends once nothing can be faster."""
    countdown, reason = Countdown(limits), ""
    best: tuple[tuple[bool, float, float], Schedule] | None = None
    try:
        for schedule in schedules:
            timeline = simulate(problem, schedule)
            over = timeline.peak_bytes > problem.budget_bytes
            figures = (timeline.peak_bytes, timeline.time_ns) if over else (timeline.time_ns, timeline.peak_bytes)
            if best is None or (over, *figures) < best[0]:
                best = ((over, *figures), schedule)
                if progress is not None and not over:
                    progress(Progress(countdown.elapsed_s(), timeline.time_ns, problem.base_time_ns, solver))
            if not over and len(schedule.steps) == len(problem.graph.ops):
                break
            if countdown.left_s() <= 0:
                reason = "Out of time."
                break
    except OutOfTime:
        reason = "Out of time."
    if best is None and not reason:
        raise ValueError(f"`{solver}` proposed no schedule.")
    # A strategy that did not come to its first schedule still knows the plain one.
    return judge(problem, best[1] if best else plain_schedule(problem.graph), solver, reason=reason)


def infeasible(problem: Problem, min_budget: int, solver: str = "") -> InfeasibleBudget:
    """The error for a budget that nothing fits (or that one strategy, `solver`, does not fit)."""
    floor, worst = floor_bytes(problem)
    asked, smallest = format_bytes(problem.budget_bytes), format_bytes(min_budget)
    # Rounded, two close numbers would look alike.
    if min_budget - problem.budget_bytes < 0.01 * min_budget:
        asked, smallest = f"{problem.budget_bytes} bytes", f"{min_budget} bytes"
    if solver:
        message = f"Budget {asked} is below the {smallest} that `{solver}` needs; raise the budget or use `auto`."
    else:
        at = f" ({_op_name(problem, worst)})" if worst >= 0 else ""
        what = "floor" if floor > problem.budget_bytes else "smallest known peak"
        message = f"Budget {asked} is below the {what} of {smallest}{at}; raise the budget or lower the batch."
    return InfeasibleBudget(message, min_budget)


def _op_name(problem: Problem, number: int) -> str:
    op = problem.graph.ops[number]
    if " " in op.name and not op.target:
        # What stands between ops is described in words.
        return op.name
    return f"op `{op.name}` in `{op.module}`" if op.module else f"op `{op.name}`"


def _reason(problem: Problem, peak_bytes: int) -> str:
    if peak_bytes <= problem.budget_bytes:
        return "The schedule fits."
    return f"The schedule peaks {format_bytes(peak_bytes - problem.budget_bytes)} over the budget."
