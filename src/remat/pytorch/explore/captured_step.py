"""A step that was captured and measured once, to be solved for any budget and run under any schedule.

In: a step and its arguments. Out: a `CapturedStep`. Whatever it runs, it runs in turns with the plain step, so that
what else the machine does slows both alike; nothing is captured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.core.budget import Budget, BudgetUnit
from remat.core.copies import has_copies, only_used
from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.results.plan import Plan
from remat.core.schedule import Schedule
from remat.core.solution import Solution
from remat.pytorch.device import rules_of
from remat.pytorch.measure.measure_step import measure_once, seconds_of, training_call
from remat.pytorch.run.optimize import eager_session_of, plan_ahead, plan_of
from remat.pytorch.run.planning import moving_problem
from remat.pytorch.run.settings import Settings
from remat.solvers.base import Solver
from remat.solvers.frontier import Attempt, Candidate
from remat.within import solve_within

PAIRS = 3
"""Timed steps, each beside a plain one."""
UNLIMITED = Budget(float(LARGEST_BYTES // 2), BudgetUnit.BYTES)


@dataclass(frozen=True, slots=True)
class Run:
    """What a step really used, beside plain steps that ran in turns with it."""

    peak_bytes: int
    seconds: float
    """The median of several, as is `ratio`."""
    ratio: float
    """Its time over the plain step's."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    step: Any
    planned: Any
    """The same step, which runs under the plan it was given last."""
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    base: Plan
    """Without a limit."""
    device: torch.device

    @property
    def problem(self) -> Problem:
        return self.base.problem

    def attempt(self, *, time_limit_s: float, seed: int) -> Attempt:
        """A function that solves for what really fits on this device."""
        rules = rules_of(self.device)

        def solve(problem: Problem, solver: Solver) -> tuple[Solution, int]:
            return solve_within(problem, solver, rules=rules, time_limit_s=time_limit_s, seed=seed)

        return solve

    def slack_bytes(self, problem: Problem, schedule: Schedule) -> int:
        """What the device's allocator takes beyond the live bytes of `schedule`."""
        return rules_of(self.device).slack_bytes(problem, schedule)

    def offloading(self, where: str) -> CapturedStep | None:
        """The same, some of whose values may spend a while elsewhere; None where none can."""
        moving = moving_problem(self.problem, where, eager_session_of(self.planned).described_calls())
        return None if moving is None else replace(self, base=replace(self.base, problem=moving, offload=where))

    def under(self, candidate: Candidate, budget_bytes: int) -> Plan:
        """The plan that `candidate` is."""
        problem, solution = self.problem.with_budget(budget_bytes), candidate.solution
        if solution.schedule is not None:
            problem, schedule = only_used(problem, solution.schedule)
            solution = replace(solution, schedule=schedule)
        return replace(
            self.base,
            problem=problem,
            solution=solution,
            allocator_slack_bytes=candidate.slack_bytes,
            arena=None,
            offload=self.base.offload if has_copies(problem.graph) else "",
        )

    def run_plan(self, plan: Plan, pairs: int = PAIRS) -> Run:
        eager_session_of(self.planned).set_plan(plan)
        return self.run(self.planned, pairs)

    def run(self, step: Any, pairs: int = PAIRS) -> Run:
        """Run another form of the step, which takes the same arguments."""
        plain, ours = self._call(self.step), self._call(step)
        ours()
        times = [(seconds_of(plain, self.device), seconds_of(ours, self.device)) for _ in range(pairs)]
        peak = measure_once(step, *self.args, **self.kwargs).peak_bytes
        ratio = statistics.median(mine / theirs for theirs, mine in times)
        return Run(peak, statistics.median(mine for _, mine in times), ratio)

    def _call(self, step: Any) -> Callable[[], Any]:
        return training_call(step, self.args, self.kwargs)


def prepare(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> CapturedStep:
    """Capture the step and measure its ops; the step does not run."""
    planned = plan_ahead(step, args, kwargs, Settings(UNLIMITED, solver="none"), optimizers)
    device = eager_session_of(planned).calls[0].variant.captured.device
    return CapturedStep(step, planned, args, kwargs, plan_of(planned), device)
