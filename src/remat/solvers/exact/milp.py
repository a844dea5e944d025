"""The exact optimum by mixed-integer programming (Checkmate), on HiGHS, SCIP, Gurobi or CPLEX.

In: a problem. Out: the fastest schedule, with a bound that holds for every schedule. The program is first solved with
stages that say nothing about order, which is small and whose optimum bounds every schedule. Where the schedule it
describes is over the budget, those stages are put in order, in a few passes each, and it is solved again.

With copies to the host the program is another: see `milp_with_copies`.

A program too large to build in reasonable time is not tried: the answer is then the quick schedule it would start from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.solvers.backends import Backend, TooLarge, get_backend
from remat.solvers.backends.program import EXACT_GAP, ProgramAnswer
from remat.solvers.exact.checkmate import Checkmate, safe_extra_time
from remat.solvers.exact.exact_solver import ExactSolver, offer_if_it_fits, start_quickly, what_was_found
from remat.solvers.exact.milp_with_copies import solve_with_copies
from remat.solvers.exact.stages import make_stages, stage_of_steps, to_schedule
from remat.solvers.schedule.editable import flatten
from remat.solvers.search.incumbent import ScheduleIncumbent
from remat.solvers.search.start import START_S, repair

MAX_CHOICES = 120_000
"""Larger programs take longer to build and to presolve than any time limit allows for."""
FIRST_SHARE = 0.7
"""Of the time left, for the program whose optimum is the bound; the rest is for putting stages in order."""


@final
@dataclass(frozen=True, slots=True)
class Milp(ExactSolver):
    name: str = "milp"
    backend: str = "highs"
    passes: int = 3
    """How often a stage may go through the ops where its schedule would not fit otherwise."""
    max_choices: int = MAX_CHOICES

    def search(self, incumbent: ScheduleIncumbent) -> str:
        start_quickly(incumbent)
        return "" if incumbent.is_closed else _Search(self, incumbent).run()

    def schedules_with_copies(
        self, problem: Problem, limits: Limits, raise_bound: Callable[[float], None]
    ) -> Iterator[Schedule]:
        return solve_with_copies(problem, get_backend(self.backend), replace(limits, gap=EXACT_GAP), raise_bound)


class _Search:
    """One solve, round by round."""

    def __init__(self, options: Milp, incumbent: ScheduleIncumbent) -> None:
        self.options, self.incumbent = options, incumbent
        self.minimise: Backend = get_backend(options.backend)
        self.flat = flatten(incumbent.problem)
        self.notes: list[str] = []
        self.reason = "Out of time."

    def run(self) -> str:
        """Solve until the schedule is optimal, nothing is left to put in order or time is up; returns the reason."""
        ordered: frozenset[int] = frozenset()
        while self.incumbent.left_s() > 0:
            more = self._round(ordered)
            if not more:
                break
            ordered |= more
        return " ".join([*self.notes, "Proven optimal." if self.incumbent.is_closed else self.reason])

    def _round(self, ordered: frozenset[int]) -> frozenset[int]:
        """Solve with these stages in order; returns the stages where the schedule is over the budget."""
        incumbent, problem = self.incumbent, self.incumbent.problem
        stages = make_stages(self.flat, ordered=ordered, passes=self.options.passes, most=self.options.max_choices)
        if stages is None:
            self.reason = f"A program with more than {self.options.max_choices} choices is not tried."
            return frozenset()
        model = Checkmate(self.flat, problem.budget_bytes, stages)
        answer = self._solve(model, incumbent.left_s() * (1.0 if ordered else FIRST_SHARE))
        if not ordered:
            incumbent.raise_bound(safe_extra_time(model, answer.bound), "program")
        schedule = None if answer.point is None else to_schedule(self.flat, stages, model.held_at(answer.point))
        fits = offer_if_it_fits(incumbent, schedule, "program")
        if answer.complete and (fits or answer.point is None):
            most = f"at most {self.options.passes} passes over the ops between two first runs"
            self.reason = f"{what_was_found(incumbent)} with {most}."
        if fits or schedule is None:
            return frozenset()
        limits = incumbent.limits.within(min(max(incumbent.left_s(), 0.5), START_S))
        offer_if_it_fits(incumbent, repair(problem, schedule, limits), "repair")
        return frozenset() if incumbent.is_closed else self._overflows(schedule) - ordered

    def _solve(self, model: Checkmate, time_limit_s: float) -> ProgramAnswer:
        known = self.incumbent.best
        start: Mapping[int, float] = model.point_of(self.incumbent.problem, known) if known is not None else {}
        limits = Limits(time_limit_s, gap=EXACT_GAP, seed=self.incumbent.limits.seed % 2**31)
        try:
            return self.minimise(model.program, limits, start)
        except TooLarge as error:
            self.notes.append(f"{error}; HiGHS took over.")
            self.minimise = get_backend("highs")
            return self.minimise(model.program, limits, start)

    def _overflows(self, schedule: Schedule) -> frozenset[int]:
        problem = self.incumbent.problem
        loads = simulate(problem, schedule).live_bytes
        places = zip(stage_of_steps(schedule), loads, strict=True)
        return frozenset(stage for stage, load in places if load > problem.budget_bytes)
