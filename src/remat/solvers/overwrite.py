"""Any solver, for problems whose ops may write into an input that nothing reads later.

In: a problem with `Op.overwrites`, and a solver that knows nothing of them. Out: a solution whose peak counts them.
The solver is given the problem as if every op that may overwrite did: the output then takes the input's place while
the op runs, which is a workspace smaller by the output. That is a relaxation, so what is proven there holds. Mostly the
schedule does as supposed; where a recomputation reads an input once more after it should have been overwritten, the
schedule needs more, and the solver is asked again for as much less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from remat.core.eager import without_overwrites
from remat.core.problem import Problem
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.solvers.base import Progress, Solver

ROUNDS = 3
"""Attempts before the solver has to do without overwriting."""


def has_overwrites(problem: Problem) -> bool:
    return any(op.overwrites for op in problem.graph.ops)


def always_overwritten(problem: Problem) -> Problem:
    """The problem as if every op that may overwrite an input did so in every schedule: never harder than it is."""
    if not has_overwrites(problem):
        return problem
    costs = problem.costs
    workspace = tuple(
        need - costs.size_bytes[op.outputs[0]] if op.overwrites else need
        for op, need in zip(problem.graph.ops, costs.workspace_bytes, strict=True)
    )
    plain = without_overwrites(problem)
    return replace(plain, costs=replace(costs, workspace_bytes=workspace))


@final
@dataclass(frozen=True, slots=True)
class Overwriting:
    """A solver whose schedules may count on overwriting."""

    inner: Solver

    @property
    def name(self) -> str:
        return self.inner.name

    def solve(
        self,
        problem: Problem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Solution:
        if not has_overwrites(problem):
            return self.inner.solve(problem, time_limit_s=time_limit_s, seed=seed, progress=progress)
        relaxed, budget, bound = always_overwritten(problem), problem.budget_bytes, 0.0
        for round in range(ROUNDS):
            share = time_limit_s / 2**round
            found = self.inner.solve(relaxed.with_budget(budget), time_limit_s=share, seed=seed, progress=progress)
            bound = found.bound_ns if round == 0 else bound
            if found.schedule is None:
                break
            peak = simulate(problem, found.schedule).peak_bytes
            if peak <= problem.budget_bytes:
                return _stated(found, peak, bound)
            budget -= (peak - problem.budget_bytes) * 2**round
        if found.schedule is None and budget == problem.budget_bytes:
            return found
        plain = without_overwrites(problem)
        found = self.inner.solve(plain, time_limit_s=time_limit_s / 2**ROUNDS, seed=seed, progress=progress)
        peak = found.peak_bytes if found.schedule is None else simulate(problem, found.schedule).peak_bytes
        return _stated(found, peak, bound)


def _stated(found: Solution, peak_bytes: int, bound_ns: float) -> Solution:
    """The solution with its real peak; a bound for less memory than there is would prove too much."""
    bound = min(bound_ns, found.bound_ns)
    proven = found.status is not Status.OPTIMAL or bound >= found.bound_ns
    status = found.status if proven else Status.FEASIBLE
    return replace(found, status=status, peak_bytes=peak_bytes, bound_ns=bound)
