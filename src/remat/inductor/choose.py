"""Which values of the forward to save for a compiled backward.

In: a `Joint`, what kernels cost, how many bytes the step may add. Out: a `Choice`. The solvers schedule the contracted
graph; what their schedule carries from forward to backward is saved, the rest is made again. They do not know that
kernels write into what they read last, so the memory they are given is corrected until the prediction, which knows,
comes close to the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import format_bytes
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import InfeasibleBudget
from remat.inductor.contract import Contracted, contract
from remat.inductor.joint import Joint
from remat.inductor.predict import Prediction, Rates, predict
from remat.inductor.unroll import Unrolled, copied_rates, unroll
from remat.solvers import solve
from remat.solvers.floor import squeeze

ROUNDS = 6
WIDER = (1.1, 1.25, 1.5, 2.0)
CLOSE = 0.005
"""Of the budget: nearer than this nothing more is tried."""


@dataclass(frozen=True, slots=True)
class Choice:
    saved: frozenset[int]
    """Nodes whose results are saved."""
    prediction: Prediction
    solution: Solution
    """Of the contracted problem."""
    is_default: bool = False
    """Whether this is what torch.compile saves by itself."""
    unrolled: Unrolled | None = None
    """Where backward makes values again more than once."""


def choose(
    joint: Joint,
    rates: Rates,
    budget_bytes: int,
    *,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    may_copy: bool = True,
) -> Choice:
    """The fastest choice found whose predicted peak is within `budget_bytes`.

    Without `may_copy` backward makes no value again more than once.
    """
    search = _Search(joint, rates, budget_bytes, solver, time_limit_s / 2, may_copy)
    for _ in range(ROUNDS):
        if search.is_over():
            break
        search.attempt()
    if search.best is not None:
        return search.best
    least = leanest(joint, rates, may_copy=may_copy)
    if least.prediction.peak_bytes <= budget_bytes:
        return least
    peak = least.prediction.peak_bytes
    raise InfeasibleBudget(
        f"The compiled step needs {format_bytes(peak)} beyond what is there when it begins, and the budget leaves "
        f"{format_bytes(max(budget_bytes, 0))}; give more.",
        min_budget=peak,
    )


def leanest(joint: Joint, rates: Rates, *, may_copy: bool = True) -> Choice:
    """The choice with the smallest peak that is known.

    The smallest schedules run ops many times, which compiled code cannot always follow, so somewhat larger ones are
    looked at too.
    """
    contracted = contract(joint, rates)
    problem = Problem(contracted.graph, contracted.costs, budget_bytes=0)
    smallest = squeeze(problem)
    tapes = [smallest, *(squeeze(problem, int(smallest.peak * factor)) for factor in WIDER)]
    found = [
        _choice(joint, rates, contracted, _as_solution(problem, tape.schedule(), "floor"), may_copy) for tape in tapes
    ]
    return min(found, key=lambda choice: choice.prediction.peak_bytes)


def given(joint: Joint, rates: Rates, saved: frozenset[int]) -> Choice:
    """What is known of a choice that was made elsewhere."""
    contracted = contract(joint, rates)
    problem = Problem(contracted.graph, contracted.costs, budget_bytes=0)
    solution = _as_solution(problem, plain_schedule(contracted.graph), "given")
    return Choice(saved, predict(joint, saved, rates), solution)


class _Search:
    """Looks for how much memory the solver may be given."""

    def __init__(
        self, joint: Joint, rates: Rates, budget_bytes: int, solver: str, time_limit_s: float, may_copy: bool
    ) -> None:
        self.may_copy = may_copy
        self.joint, self.rates, self.budget_bytes = joint, rates, budget_bytes
        self.solver, self.time_limit_s = solver, time_limit_s
        self.contracted = contract(joint, rates)
        self.best: Choice | None = None
        self._memory = budget_bytes
        self._enough = 0
        """The most memory with which the prediction was within the budget, or nothing fitted."""
        self._too_much: int | None = None
        self._is_close = False

    def is_over(self) -> bool:
        is_squeezed = self._too_much is not None and self._too_much - self._enough <= CLOSE * self.budget_bytes
        return self._is_close or is_squeezed or self.budget_bytes <= 0

    def attempt(self) -> None:
        found = self._solve()
        spare = self.budget_bytes - found.prediction.peak_bytes if found is not None else 0
        if found is None or spare >= 0:
            self._enough = max(self._enough, self._memory)
        else:
            self._too_much = min(self._memory, self._too_much or self._memory)
        if found is not None and spare >= 0:
            self._is_close = spare <= CLOSE * self.budget_bytes or _keeps_all(found)
            if self.best is None or found.prediction.time_ns < self.best.prediction.time_ns:
                self.best = found
        # A little less than what would just fit, so that the next attempt is not over by a hair.
        self._memory += spare - int(CLOSE * self.budget_bytes / 2) if found is not None else self.budget_bytes // 10
        if self._too_much is not None and not self._enough < self._memory < self._too_much:
            self._memory = (self._enough + self._too_much) // 2

    def _solve(self) -> Choice | None:
        problem = Problem(self.contracted.graph, self.contracted.costs, self._memory)
        try:
            solution = solve(problem, self.solver, time_limit_s=self.time_limit_s)
        except InfeasibleBudget:
            return None
        if solution.schedule is None:
            return None
        return _choice(self.joint, self.rates, self.contracted, solution, self.may_copy)


def _keeps_all(choice: Choice) -> bool:
    schedule = choice.solution.schedule
    return schedule is not None and not schedule.recomputed()


def _choice(joint: Joint, rates: Rates, contracted: Contracted, solution: Solution, may_copy: bool) -> Choice:
    assert solution.schedule is not None
    unrolled = unroll(joint, contracted, solution.schedule)
    plain = Choice(unrolled.saved, predict(joint, unrolled.saved, rates), solution)
    if not unrolled.copies or not may_copy:
        return plain
    prediction = predict(unrolled.joint, unrolled.saved, copied_rates(rates, unrolled, len(joint.nodes)))
    choice = Choice(unrolled.saved, prediction, solution, unrolled=unrolled)
    return choice if prediction.peak_bytes < plain.prediction.peak_bytes else plain


def _as_solution(problem: Problem, schedule: Schedule, solver: str) -> Solution:
    found = simulate(problem, schedule)
    return Solution(
        Status.FEASIBLE, schedule, found.time_ns, found.peak_bytes, problem.base_time_ns, found.peak_bytes, solver
    )
