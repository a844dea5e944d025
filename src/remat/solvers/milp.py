"""The exact optimum by mixed-integer programming (Checkmate), on HiGHS, SCIP, Gurobi or CPLEX.

In: a problem. Out: the fastest schedule, with a bound that holds for every schedule. The program is first solved with
stages that say nothing about order, which is small and whose optimum bounds every schedule. Where the schedule it
describes is over the budget, those stages are put in order, in a few passes each, and it is solved again.

A program too large to build in reasonable time is not tried: the answer is then the quick schedule it would start from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.backends import Backend, TooLarge, get_backend
from remat.solvers.checkmate import Checkmate, safe_time
from remat.solvers.exact import Exact, ExactSolver
from remat.solvers.program import Answer, Limits
from remat.solvers.stages import make_stages, stage_of_steps, to_schedule
from remat.solvers.start import START_S, repair
from remat.solvers.tape import shape_of

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
    clock: Callable[[], float] = time.monotonic

    def search(self, found: Exact, seed: int) -> str:
        found.start_quickly(seed)
        return "" if found.is_closed else _Search(self, found, seed).run()


class _Search:
    """One solve, round by round."""

    def __init__(self, options: Milp, found: Exact, seed: int) -> None:
        self.options, self.found, self.seed = options, found, seed
        self.minimise: Backend = get_backend(options.backend)
        self.shape = shape_of(found.problem)
        self.notes: list[str] = []
        self.reason = "Out of time."

    def run(self) -> str:
        """Solve until the schedule is optimal, nothing is left to put in order or time is up; returns the reason."""
        ordered: frozenset[int] = frozenset()
        while self.found.left_s() > 0:
            more = self._round(ordered)
            if not more:
                break
            ordered |= more
        return " ".join([*self.notes, "Proven optimal." if self.found.is_closed else self.reason])

    def _round(self, ordered: frozenset[int]) -> frozenset[int]:
        """Solve with these stages in order; returns the stages where the schedule is over the budget."""
        found, problem = self.found, self.found.problem
        stages = make_stages(self.shape, ordered=ordered, passes=self.options.passes, most=self.options.max_choices)
        if stages is None:
            self.reason = f"A program with more than {self.options.max_choices} choices is not tried."
            return frozenset()
        model = Checkmate(self.shape, problem.budget_bytes, stages)
        answer = self._solve(model, found.left_s() * (1.0 if ordered else FIRST_SHARE))
        if not ordered:
            found.raise_bound(safe_time(problem, model, answer.bound), "program")
        schedule = None if answer.point is None else to_schedule(self.shape, stages, model.held_at(answer.point))
        fits = found.offer(schedule, "program")
        if answer.complete and (fits or answer.point is None):
            self.reason = f"{found.what} with at most {self.options.passes} passes over the ops between two first runs."
        if fits or schedule is None:
            return frozenset()
        limit = min(max(found.left_s(), 0.5), START_S)
        found.offer(repair(problem, schedule, time_limit_s=limit, clock=self.options.clock), "repair")
        return frozenset() if found.is_closed else self._overflows(schedule) - ordered

    def _solve(self, model: Checkmate, time_limit_s: float) -> Answer:
        known = self.found.best
        start = model.point_of(self.found.problem, known) if known is not None else {}
        limits = Limits(time_limit_s, seed=self.seed % 2**31, start=start)
        try:
            return self.minimise(model.program, limits)
        except TooLarge as error:
            self.notes.append(f"{error}; HiGHS took over.")
            self.minimise = get_backend("highs")
            return self.minimise(model.program, limits)

    def _overflows(self, schedule: Schedule) -> frozenset[int]:
        problem = self.found.problem
        loads = simulate(problem, schedule).live_bytes
        places = zip(stage_of_steps(schedule), loads, strict=True)
        return frozenset(stage for stage, load in places if load > problem.budget_bytes)
