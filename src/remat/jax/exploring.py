"""`remat.jax.pareto` and `remat.jax.profile`: what memory costs a loss, and what fills it.

In: a loss and its arguments. Out: the same `Pareto` and `StepProfile` as for PyTorch. Both tell what the model knows,
where XLA adds a little of its own; a curve that is verified is compiled point by point, and carries what XLA says.
Scans get a split of their own at each budget, so that strategies of the solvers, which know one graph, are not drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from remat.core.budget import format_bytes
from remat.core.memory_rules import CPU
from remat.core.problem import Problem, floor_bytes
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.core.results.profile import StepProfile
from remat.core.results.replay import replay
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution
from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.jax.costs.compiled import compile_step, compiler_options, memory_of
from remat.jax.graph.leaves import Leaves
from remat.jax.loop import Asked, FlatStep, Model, means_of, model_of, plain_pull, propose, replayed
from remat.jax.planning import FlatFunction, plain_plan, step_of
from remat.solvers import get_solver
from remat.solvers.base import Solver, judge
from remat.solvers.frontier import BASELINES, Candidate, Curve, lowest_candidate
from remat.solvers.search.floor import lowest_schedule
from remat.solvers.sweep import even_budgets
from remat.within import solve_within

PAIRS = 3
"""Timed steps, each beside a plain one."""


@dataclass(frozen=True, slots=True)
class CurveSearch:
    """What to find, how long to look, and whom to tell."""

    points: int = 12
    lead: Solver = field(default_factory=lambda: get_solver("auto"))
    others: tuple[Solver, ...] = field(default_factory=lambda: tuple(map(get_solver, BASELINES)))
    time_limit_s: float = 5.0
    seed: int = 0
    verify: bool = False
    tell: Callable[[int, int, str], None] = lambda done, total, what: None
    """Called with how many tasks are done, how many there are, and what comes next."""
    stop: Callable[[], bool] = lambda: False
    """Asked between tasks: what was found so far is enough."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A point and what would run there."""

    point: ParetoPoint
    model: Model
    schedule: Schedule


def pareto(
    function: Callable[..., Any],
    *args: Any,
    points: int = 12,
    solvers: Sequence[str] = BASELINES,
    verify: bool = False,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    time_limit_s: float = 5.0,
    seed: int = 0,
    **kwargs: Any,
) -> Pareto:
    """The least time for each of `points` amounts of memory; with `verify`, each schedule is compiled and run."""
    others = tuple(get_solver(name) for name in solvers if name != "auto")
    search = CurveSearch(points, others=others, time_limit_s=time_limit_s, seed=seed, verify=verify)
    return find_pareto(function, args, kwargs, search, argnums=argnums, has_aux=has_aux)


def find_pareto(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    search: CurveSearch,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    name: str = "",
) -> Pareto:
    """As `pareto`, with everything that can be asked for."""
    if search.points < 1:
        raise BudgetError(f"A curve of {search.points} budgets has no points; ask for one or more.")
    search.tell(0, 1, "tracing and timing")
    leaves, step = _step(function, args, kwargs, argnums, has_aux)
    model = richest(step)
    found, others = _of_one_graph(model, search) if step.scans is None else (_of_scans(step, model, search), [])
    if search.verify:
        found = list(_verified(step, leaves, found, search))
    plan = plain_plan(leaves, model)
    return Pareto(
        name=name or getattr(function, "__name__", type(function).__name__),
        device=plan.fingerprint.device,
        plain_peak_bytes=plan.plain_peak_bytes,
        base_time_ns=model.problem.base_time_ns,
        floor_bytes=floor_bytes(model.problem)[0] if step.scans is None else model.resident_total,
        points=tuple(item.point for item in found),
        baselines=tuple(item.point for item in others),
    )


def profile(
    function: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    name: str = "",
    **kwargs: Any,
) -> StepProfile:
    """Forward and backward kernel by kernel, as modelled; `reserved_bytes` is what the compiled plain step needs."""
    leaves, step = _step(function, args, kwargs, argnums, has_aux)
    model = richest(step)
    compiled = memory_of(compile_step(plain_pull(step, model), step.compiled_for, model.cotangents(), step.options))
    called = name or getattr(function, "__name__", type(function).__name__)
    found = replay(plain_plan(leaves, model), plain_schedule(model.contracted.graph), called)
    return replace(found, reserved_bytes=compiled.peak_bytes)


def _step(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> tuple[Leaves, FlatStep]:
    leaves = Leaves.of(args, dict(kwargs))
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return leaves, step_of(FlatFunction(function, leaves, has_aux), leaves.chosen(numbers), compiler_options())


def richest(step: FlatStep) -> Model:
    """The step with nothing recomputed, in scans neither."""
    if step.scans is not None:
        step.scans.allowed_bytes = math.inf
    return model_of(step)


def _of_one_graph(model: Model, search: CurveSearch) -> tuple[list[_Found], list[_Found]]:
    """The curve, and other strategies beside it."""

    def attempt(problem: Problem, solver: Solver) -> tuple[Solution, int]:
        return solve_within(problem, solver, rules=CPU, time_limit_s=search.time_limit_s, seed=search.seed)

    problem = model.problem
    candidates = [lowest_candidate(problem, search.lead.name, lambda problem, schedule: 0)]
    plain = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    lowest = candidates[0].peak_bytes
    budgets = even_budgets(max(plain, lowest), lowest, search.points)
    curve = Curve(problem, budgets, search.lead, search.others, attempt)
    tasks, results = curve.tasks(), curve.trace()
    for done, (solver, budget) in enumerate(tasks):
        search.tell(done, len(tasks), f"{solver.name} at {format_bytes(budget)}")
        candidate = next(results)
        candidates += [candidate] if candidate is not None else []
        if search.stop():
            break
    return _as_found(curve.points(candidates), model), _as_found(curve.baselines(candidates), model)


def _as_found(points: Sequence[tuple[ParetoPoint, Candidate]], model: Model) -> list[_Found]:
    return [_Found(point, model, item.solution.schedule) for point, item in points if item.solution.schedule]


def _of_scans(step: FlatStep, model: Model, search: CurveSearch) -> list[_Found]:
    assert step.scans is not None
    base, plain = model.problem.base_time_ns, simulate(model.problem, plain_schedule(model.contracted.graph)).peak_bytes
    step.scans.allowed_bytes = 0
    leanest = model_of(step)
    schedule = lowest_schedule(leanest.problem)
    last = judge(leanest.problem.with_budget(simulate(leanest.problem, schedule).peak_bytes), schedule, "auto")
    found: list[_Found] = []
    budgets = even_budgets(plain, last.peak_bytes, search.points)
    for done, budget in enumerate(budgets):
        search.tell(done, len(budgets), f"{search.lead.name} at {format_bytes(budget)}")
        asked = Asked(search.lead.name, search.time_limit_s, search.seed)
        try:
            proposed, solution = propose(step, model, budget - model.resident_total, asked)
        except InfeasibleBudget:
            proposed, solution = leanest, last
        assert solution.schedule is not None
        bound = min(base, solution.time_ns)
        point = ParetoPoint(search.lead.name, budget, solution.peak_bytes, solution.time_ns, bound)
        if point.peak_bytes <= budget:
            found.append(_Found(point, proposed, solution.schedule))
        if search.stop():
            break
    return found


def _verified(step: FlatStep, leaves: Leaves, found: Sequence[_Found], search: CurveSearch) -> Iterator[_Found]:
    """Points with what XLA says of them, and times beside those of the plain step."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves.arrays):
        raise RematError("A curve that is verified runs its steps; hand it arrays instead of shapes.")
    model = found[0].model
    plain = compile_step(plain_pull(step, model), step.compiled_for, model.cotangents(), step.options)
    given = [jax.numpy.ones(aval.shape, aval.dtype) for aval in _free_cotangents(model)]
    for done, item in enumerate(found):
        if search.stop():
            yield item
            continue
        search.tell(done, len(found), f"compiling at {format_bytes(item.point.budget_bytes)}")
        pull = replayed(item.model.replay(item.schedule), means_of(item.model, item.schedule))
        compiled = compile_step(pull, step.compiled_for, item.model.cotangents(), step.options)
        peak = item.model.resident_total + memory_of(compiled).temporary_bytes
        ratio = _ratio(plain, compiled, (*leaves.arrays, *given))
        yield replace(item, point=replace(item.point, measured_peak_bytes=peak, measured_ratio=ratio))


def _free_cotangents(model: Model) -> list[Any]:
    """Those that the compiled step takes as arguments."""
    from remat.jax.costs.compiled import is_loss

    cotangents = model.cotangents()
    return [] if is_loss(cotangents) else cotangents


def _ratio(plain: Any, ours: Any, arrays: Sequence[Any]) -> float:
    """The least time of the one over that of the other, taken in turns."""
    best = [math.inf, math.inf]
    for _ in range(PAIRS + 1):
        for place, run in enumerate((plain, ours)):
            began = time.perf_counter()
            jax.block_until_ready(run(*arrays))
            best[place] = min(best[place], time.perf_counter() - began)
    return best[1] / best[0]
