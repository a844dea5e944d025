"""`pareto`: what a step's memory costs in time, from the plain peak down to the smallest that anything fits.

In: a step and its arguments. Out: a `Pareto`. The step is captured and measured once and not run, unless its points are
to be verified: then every schedule on the curve, and of each baseline that has only one, really runs in turns with the
plain step, without being captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from remat.core.budget import Budget, format_bytes, parse_budget
from remat.core.problem import floor_bytes
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.core.results.plan import Plan
from remat.errors import BudgetError, InfeasibleBudget
from remat.pytorch.device import total_bytes
from remat.pytorch.explore.captured_step import CapturedStep, prepare
from remat.pytorch.host.shared import checked_place
from remat.pytorch.run.optimize import listed
from remat.solvers import get_solver
from remat.solvers.base import Solver
from remat.solvers.frontier import BASELINES, Candidate, Curve, has_one_schedule, lowest_candidate
from remat.solvers.sweep import even_budgets

OFFLOADING = "auto, offload"
LOWER_BUDGETS = 4
"""From the smallest of recomputation down to the floor, tried with copies."""

Budgets = int | Sequence[str | int | float | Budget]
Found = list[tuple[ParetoPoint, Candidate]]


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """What to find, how long to look, and whom to tell."""

    budgets: Budgets = 12
    lead: Solver = field(default_factory=lambda: get_solver("auto"))
    others: tuple[Solver, ...] = field(default_factory=lambda: tuple(map(get_solver, BASELINES)))
    time_limit_s: float = 5.0
    seed: int = 0
    verify: bool = False
    offload: str = ""
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
    offload: str | None = None,
    time_limit: float = 5.0,
    seed: int = 0,
    **kwargs: Any,
) -> Pareto:
    """Minimum time for every budget of `step(*args, **kwargs)`, with the strategies `solvers` on the same axes.

    `budgets` is how many, or which. `time_limit` holds for each solve. With `verify` the schedules really run. With
    `offload`, as `optimize` takes it, what copies allow is one more line, among the baselines as "auto, offload".
    """
    search = BudgetSearch(
        budgets=budgets,
        others=tuple(get_solver(name) for name in solvers if name != "auto"),
        time_limit_s=time_limit,
        seed=seed,
        verify=verify,
        offload=checked_place(offload),
        optimizers=listed(optimizer),
    )
    return find_pareto(step, args, kwargs, search)


def find_pareto(
    step: Any, args: Sequence[Any], kwargs: Mapping[str, Any], search: BudgetSearch, name: str = ""
) -> Pareto:
    """As `pareto`, with everything that can be asked for."""
    _check(search.budgets)
    search.tell(0, 1, "capturing and measuring")
    subject = prepare(step, args, kwargs, search.optimizers)
    curve, found = trace(subject, search)
    points, baselines = curve.points(found), curve.baselines(found)
    if not points:
        lowest = min(item.peak_bytes for item in found)
        raise InfeasibleBudget(
            f"None of the {len(curve.budgets)} budgets fits; the smallest peak known is {format_bytes(lowest)}: "
            "ask for budgets from there on.",
            lowest,
        )
    if search.verify:
        points, baselines = _verify(subject, points, search), _verify(subject, baselines, search)
    if search.offload:
        baselines += _offloaded(subject, search, curve.budgets)
    return as_pareto(subject, points, baselines, name or getattr(step, "__name__", type(step).__name__))


def as_pareto(subject: CapturedStep, points: Found, baselines: Found, name: str) -> Pareto:
    return Pareto(
        name=name,
        device=subject.base.fingerprint.device,
        plain_peak_bytes=subject.base.plain_peak_bytes,
        base_time_ns=subject.problem.base_time_ns,
        floor_bytes=floor_bytes(subject.problem)[0],
        points=tuple(point for point, _ in points),
        baselines=tuple(point for point, _ in baselines),
    )


def _offloaded(subject: CapturedStep, search: BudgetSearch, budgets: Sequence[int]) -> Found:
    """The fastest known with copies at each of these budgets, and at smaller ones that copies may meet."""
    moving = subject.offloading(search.offload)
    if moving is None:
        return []
    lower = even_budgets(budgets[-1], floor_bytes(subject.problem)[0], LOWER_BUDGETS)
    attempt = moving.attempt(time_limit_s=search.time_limit_s, seed=search.seed)
    curve = Curve(moving.problem, tuple(dict.fromkeys((*budgets, *lower))), search.lead, (), attempt)
    found: list[Candidate] = []
    for done, ((_, budget), candidate) in enumerate(zip(curve.tasks(), curve.trace(), strict=True)):
        search.tell(done, len(curve.budgets), f"{OFFLOADING} at {format_bytes(budget)}")
        found += [candidate] if candidate is not None else []
        if search.stop():
            break
    made = [(replace(point, solver=OFFLOADING), candidate) for point, candidate in curve.points(found)]
    return _verify(moving, made, search) if search.verify else made


def _check(budgets: Budgets) -> None:
    """Refuse what cannot be read before the step is captured."""
    if isinstance(budgets, int) and budgets < 1:
        raise BudgetError(f"A curve of {budgets} budgets has no points; ask for one or more.")
    for budget in () if isinstance(budgets, int) else budgets:
        parse_budget(budget)


def trace(subject: CapturedStep, search: BudgetSearch) -> tuple[Curve, list[Candidate]]:
    """Solve for every budget until all is done or the search is stopped."""
    search.tell(0, 1, "looking for the smallest peak")
    found = [lowest_candidate(subject.problem, search.lead.name, subject.slack_bytes)]
    budgets = _resolve(search.budgets, subject.base, found[0].peak_bytes, subject.device)
    attempt = subject.attempt(time_limit_s=search.time_limit_s, seed=search.seed)
    curve = Curve(subject.problem, budgets, search.lead, search.others, attempt)
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
    total = total_bytes(device)
    found = {parse_budget(item).resolve(plain_peak_bytes=base.plain_peak_bytes, device_bytes=total) for item in asked}
    return tuple(sorted(found, reverse=True))


def _verify(subject: CapturedStep, found: Found, search: BudgetSearch) -> Found:
    """Points with what was measured; after a stop, and of strategies that change with the budget, as they were."""
    changing = {solver.name for solver in search.others if not has_one_schedule(solver)}
    result: Found = []
    for done, (point, candidate) in enumerate(found):
        if point.solver not in changing and not search.stop():
            search.tell(done, len(found), f"running {point.solver} at {format_bytes(point.budget_bytes)}")
            run = subject.run_plan(subject.under(candidate, point.budget_bytes))
            point = replace(point, measured_peak_bytes=run.peak_bytes, measured_ratio=run.ratio)
        result.append((point, candidate))
    return result
