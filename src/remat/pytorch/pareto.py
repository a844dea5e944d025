"""`pareto`: what a step's memory costs in time, from the plain peak down to the smallest that anything fits.

In: a step and its arguments. Out: a `Pareto`. The step is captured and measured once and not run, unless its points are
to be verified: then every schedule on the curve, and of each baseline that has only one, really runs in turns with the
plain step, without being captured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.core.budget import Budget, BudgetUnit, format_bytes, parse_budget
from remat.core.pareto import Pareto, ParetoPoint
from remat.core.plan import Plan
from remat.core.problem import LARGEST, Problem, floor_bytes
from remat.core.schedule import Schedule
from remat.core.solution import Solution
from remat.errors import BudgetError, InfeasibleBudget
from remat.pipeline import slack_bytes, solve_within
from remat.pytorch.optimize import listed, plan_ahead, plan_of, session_of
from remat.pytorch.session import Settings, total_device_bytes
from remat.pytorch.track import measure_once, seconds_of, training_call
from remat.solvers import get_solver
from remat.solvers.base import Solver
from remat.solvers.frontier import BASELINES, Candidate, Curve, has_one_schedule, lowest_candidate
from remat.solvers.sweep import even_budgets

PAIRS = 3
"""Timed steps of a verified point, each beside a plain one."""
UNLIMITED = Budget(float(LARGEST // 2), BudgetUnit.BYTES)

Budgets = int | Sequence[str | int | float | Budget]
Found = list[tuple[ParetoPoint, Candidate]]


@dataclass(frozen=True, slots=True)
class Search:
    """What to find, how long to look, and whom to tell."""

    budgets: Budgets = 12
    lead: Solver = field(default_factory=lambda: get_solver("auto"))
    others: tuple[Solver, ...] = field(default_factory=lambda: tuple(map(get_solver, BASELINES)))
    time_limit_s: float = 5.0
    seed: int = 0
    verify: bool = False
    optimizers: Sequence[torch.optim.Optimizer] = ()
    tell: Callable[[int, int, str], None] = lambda done, total, what: None
    """Called with how many tasks are done, how many there are, and what comes next."""
    stop: Callable[[], bool] = lambda: False
    """Asked between tasks: what was found so far is enough."""


def pareto(
    step: Any,
    *args: Any,
    budgets: Budgets = 12,
    solvers: Sequence[str] = BASELINES,
    verify: bool = False,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    time_limit: float = 5.0,
    seed: int = 0,
    **kwargs: Any,
) -> Pareto:
    """Minimum time for every budget of `step(*args, **kwargs)`, with the strategies `solvers` on the same axes.

    `budgets` is how many, or which. `time_limit` holds for each solve. With `verify` the schedules really run.
    """
    search = Search(
        budgets=budgets,
        others=tuple(get_solver(name) for name in solvers if name != "auto"),
        time_limit_s=time_limit,
        seed=seed,
        verify=verify,
        optimizers=listed(optimizer),
    )
    return find_pareto(step, args, kwargs, search)


def find_pareto(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], search: Search, name: str = "") -> Pareto:
    """As `pareto`, with everything that can be asked for."""
    _check(search.budgets)
    search.tell(0, 1, "capturing and measuring")
    planned = plan_ahead(step, args, kwargs, Settings(UNLIMITED, solver="none"), search.optimizers)
    base, device = plan_of(planned), session_of(planned).calls[0].variant.captured.device
    curve, found = _trace(base, device, search)
    points, baselines = curve.points(found), curve.baselines(found)
    if not points:
        lowest = min(item.peak_bytes for item in found)
        raise InfeasibleBudget(
            f"None of the {len(curve.budgets)} budgets fits; the smallest peak known is {format_bytes(lowest)}: ask "
            "for budgets from there on.",
            lowest,
        )
    if search.verify:
        rig = _Rig(step, planned, args, kwargs, base, device)
        points, baselines = _verify(rig, points, search), _verify(rig, baselines, search)
    return Pareto(
        name=name or getattr(step, "__name__", type(step).__name__),
        device=base.fingerprint.device,
        plain_peak_bytes=base.plain_peak_bytes,
        base_time_ns=base.problem.base_time_ns,
        floor_bytes=floor_bytes(base.problem)[0],
        points=tuple(point for point, _ in points),
        baselines=tuple(point for point, _ in baselines),
    )


def _check(budgets: Budgets) -> None:
    """Refuse what cannot be read before the step is captured."""
    if isinstance(budgets, int) and budgets < 1:
        raise BudgetError(f"A curve of {budgets} budgets has no points; ask for one or more.")
    for budget in () if isinstance(budgets, int) else budgets:
        parse_budget(budget)


def _trace(base: Plan, device: torch.device, search: Search) -> tuple[Curve, list[Candidate]]:
    """Solve for every budget until all is done or the search is stopped."""
    on_cuda = device.type == "cuda"

    def attempt(problem: Problem, solver: Solver) -> tuple[Solution, int]:
        return solve_within(problem, solver, on_cuda=on_cuda, time_limit_s=search.time_limit_s, seed=search.seed)

    def slack(problem: Problem, schedule: Schedule) -> int:
        return slack_bytes(problem, schedule) if on_cuda else 0

    search.tell(0, 1, "looking for the smallest peak")
    found = [lowest_candidate(base.problem, search.lead.name, slack)]
    budgets = _resolve(search.budgets, base, found[0].peak_bytes, device)
    curve = Curve(base.problem, budgets, search.lead, search.others, attempt)
    tasks, results = curve.tasks(), curve.trace()
    for done, (solver, budget) in enumerate(tasks):
        where = "" if has_one_schedule(solver) else f" at {format_bytes(budget)}"
        search.tell(done, len(tasks), solver.name + where)
        candidate = next(results)
        if candidate is not None:
            found.append(candidate)
        if search.stop():
            break
    return curve, found


def _resolve(asked: Budgets, base: Plan, lowest: int, device: torch.device) -> tuple[int, ...]:
    """Budgets in bytes, largest first."""
    if isinstance(asked, int):
        return even_budgets(max(base.plain_peak_bytes, lowest), lowest, asked)
    total = total_device_bytes(device)
    found = {parse_budget(item).resolve(plain_peak_bytes=base.plain_peak_bytes, device_bytes=total) for item in asked}
    return tuple(sorted(found, reverse=True))


@dataclass(frozen=True, slots=True)
class _Rig:
    """A plain step and the same step under changing plans, which are run in turns."""

    step: Any
    planned: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    base: Plan
    device: torch.device

    def verified(self, point: ParetoPoint, candidate: Candidate) -> ParetoPoint:
        """The point with the peak and the step time that its schedule really has."""
        problem = self.base.problem.with_budget(point.budget_bytes)
        slack = candidate.slack_bytes
        plan = replace(self.base, problem=problem, solution=candidate.solution, allocator_slack_bytes=slack)
        session_of(self.planned).set_plan(plan)
        plain, ours = (training_call(step, self.args, self.kwargs) for step in (self.step, self.planned))
        ours()
        pairs = [(seconds_of(plain, self.device), seconds_of(ours, self.device)) for _ in range(PAIRS)]
        peak = measure_once(self.planned, *self.args, **self.kwargs).peak_bytes
        ratio = statistics.median(mine / theirs for theirs, mine in pairs)
        return replace(point, measured_peak_bytes=peak, measured_ratio=ratio)


def _verify(rig: _Rig, found: Sequence[tuple[ParetoPoint, Candidate]], search: Search) -> Found:
    """Points with what was measured; after a stop, and of strategies that change with the budget, as they were."""
    changing = {solver.name for solver in search.others if not has_one_schedule(solver)}
    result: Found = []
    for done, (point, candidate) in enumerate(found):
        if point.solver not in changing and not search.stop():
            search.tell(done, len(found), f"running {point.solver} at {format_bytes(point.budget_bytes)}")
            point = rig.verified(point, candidate)
        result.append((point, candidate))
    return result
