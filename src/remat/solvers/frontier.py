"""Time against memory: the fastest schedule known at each of several budgets, and strategies beside it.

In: a problem, budgets, the solver that leads and others to compare with. Out: candidates, one for each solve, and from
all of them the points of a curve. A schedule that fits a small budget fits every larger one, and what is proven for a
large budget holds for every smaller one; so more memory never makes the curve slower, whatever a time limit cut short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.results.pareto import ParetoPoint
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution
from remat.errors import InfeasibleBudget, MissingExtra
from remat.solvers.base import Solver, Strategy, judge
from remat.solvers.search.floor import lowest_schedule

BASELINES = ("none", "full", "sqrt_n", "selective", "chen_greedy", "revolve", "mu_two")
SETTLED_GAP = 1e-3
"""A schedule this close to its bound is not looked for again at a smaller budget that it fits."""

Attempt = Callable[[Problem, Solver], tuple[Solution, int]]
"""Solves, or raises `InfeasibleBudget`; returns also what the device's allocator takes beyond the live bytes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one solver found for one budget."""

    solver: str
    budget_bytes: int
    solution: Solution
    slack_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.solution.peak_bytes + self.slack_bytes


@dataclass(frozen=True, slots=True)
class Curve:
    """Everything to be tried on one problem."""

    problem: Problem
    budgets: tuple[int, ...]
    """Largest first."""
    lead: Solver
    others: tuple[Solver, ...]
    attempt: Attempt

    def tasks(self) -> list[tuple[Solver, int]]:
        """Solvers that have one schedule come first and once; the others at every budget after the lead."""
        once = [(solver, LARGEST_BYTES) for solver in self.others if has_one_schedule(solver)]
        often = [solver for solver in self.others if not has_one_schedule(solver)]
        return once + [(solver, budget) for budget in self.budgets for solver in (self.lead, *often)]

    def trace(self) -> Iterator[Candidate | None]:
        """One for each task, as it is found; None where nothing fits, or nothing can be faster than what is known."""
        settled: Candidate | None = None
        for solver, budget in self.tasks():
            if solver is self.lead and settled is not None and settled.peak_bytes <= budget:
                yield None
                continue
            found = candidate_at(self.problem, budget, solver, self.attempt)
            if solver is self.lead and found is not None:
                settled = found if found.solution.gap <= SETTLED_GAP else None
            yield found

    def points(self, found: Sequence[Candidate]) -> list[tuple[ParetoPoint, Candidate]]:
        """The best known at each budget that anything fits, largest first."""
        result: list[tuple[ParetoPoint, Candidate]] = []
        for budget in self.budgets:
            fitting = [item for item in found if item.peak_bytes <= budget]
            if fitting:
                best = min(fitting, key=lambda item: (item.solution.time_ns, item.peak_bytes))
                result.append((self._point(best, self.lead.name, budget, found), best))
        return result

    def baselines(self, found: Sequence[Candidate]) -> list[tuple[ParetoPoint, Candidate]]:
        """The other solvers' own schedules."""
        own = [item for item in found if item.solver != self.lead.name]
        return [(self._point(item, item.solver, item.budget_bytes, found), item) for item in own]

    def _point(self, item: Candidate, solver: str, budget: int, found: Sequence[Candidate]) -> ParetoPoint:
        time = item.solution.time_ns
        bound = min(time, proven_bound_ns(self.problem, budget, self.lead.name, found))
        return ParetoPoint(solver, budget, item.peak_bytes, time, bound)


def proven_bound_ns(problem: Problem, budget_bytes: int, lead: str, found: Sequence[Candidate]) -> float:
    """No schedule within the budget is faster: what the lead has proven for it and for larger ones."""
    own = (item for item in found if item.solver == lead and item.budget_bytes >= budget_bytes)
    return max([problem.base_time_ns, *(item.solution.bound_ns for item in own)])


def candidate_at(problem: Problem, budget_bytes: int, solver: Solver, attempt: Attempt) -> Candidate | None:
    """What `solver` finds within the budget, if anything; without a limit, its peak becomes the budget."""
    try:
        solution, slack = attempt(problem.with_budget(budget_bytes), solver)
    except (InfeasibleBudget, MissingExtra):
        return None
    is_free = budget_bytes == LARGEST_BYTES
    return Candidate(solver.name, solution.peak_bytes + slack if is_free else budget_bytes, solution, slack)


def has_one_schedule(solver: Solver) -> bool:
    """Whether the solver proposes the same schedule whatever the budget."""
    return isinstance(solver, Strategy) and solver.has_one_schedule


def lowest_candidate(problem: Problem, solver: str, slack: Callable[[Problem, Schedule], int]) -> Candidate:
    """The schedule with the smallest peak known: the low end of the curve."""
    schedule = lowest_schedule(problem)
    peak, beyond = simulate(problem, schedule).peak_bytes, slack(problem, schedule)
    return Candidate(solver, peak + beyond, judge(problem.with_budget(peak), schedule, solver), beyond)
