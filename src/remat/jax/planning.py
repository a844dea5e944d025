"""From a step to its plan, and from a plan to what runs.

In: a function with the leaves of one call, and a budget or a plan made before. Out: a `Prepared`. "0.5x" is half of the
plain step's temporary memory: arguments and results are there whatever is recomputed, and come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from remat.core.budget import Budget, BudgetUnit
from remat.core.files.plan_file import graph_hash
from remat.core.results.plan import CompiledCut, CompiledStep, Fingerprint, Plan, PlannedScan
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.errors import BudgetError, CaptureError, PlanMismatch
from remat.jax import _compat
from remat.jax.costs.compiled import StepMemory, compile_step, default_device, memory_of, platform
from remat.jax.costs.op_costs import value_sizes
from remat.jax.costs.timing import stopwatch
from remat.jax.graph import modules
from remat.jax.graph.capture import trace
from remat.jax.graph.leaves import Leaves
from remat.jax.known import KnownPlan
from remat.jax.loop import (
    Asked,
    FlatStep,
    Found,
    Model,
    means_of,
    model_of,
    outline_of,
    plain_memory,
    replayed,
    search,
)
from remat.jax.run.hold import Means, means_for
from remat.jax.run.replay import Replay
from remat.jax.scans.rewrite import GivenScans, ScanPlans, has_scans, with_planned_scans
from remat.pipeline import check_fingerprint
from remat.solvers.base import judge


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for."""

    budget: Budget
    has_aux: bool = False
    asked: Asked = Asked()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan, and what runs under it."""

    plan: Plan
    model: Model
    replay: Replay
    means: Means
    compilations: int
    memory: StepMemory | None


@dataclass(slots=True)
class FlatFunction:
    """A user's function with flat arrays in and out; it remembers how its results were put together."""

    function: Callable[..., Any]
    leaves: Leaves
    has_aux: bool
    tree: Any = None
    followed: int = field(default=0)
    changed: tuple[int, ...] = ()
    """What a call changes of the objects among its arguments; its last results."""

    def __call__(self, *arrays: Any) -> list[Any]:
        found, changes = self.leaves.call_and_look(self.function, arrays)
        self.changed = tuple(changes)
        if self.has_aux:
            if not (isinstance(found, tuple) and len(found) == 2):
                raise CaptureError(
                    "With has_aux=True the function must return a pair, of a loss and of what goes along."
                )
            self.followed = len(jax.tree.leaves(found[0]))
        results, self.tree = jax.tree.flatten(found)
        if not self.has_aux:
            self.followed = len(results)
        return [jax.numpy.asarray(item) for item in (*results, *changes.values())]

    def finished(self, results: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the caller gets, and what its objects do."""
        count = self.tree.num_leaves
        modules.write((tuple(args), dict(kwargs)), dict(zip(self.changed, results[count:], strict=True)))
        return jax.tree.unflatten(self.tree, results[:count])


def prepare(function: FlatFunction, wanted: Sequence[bool] | None, wishes: Wishes) -> Prepared:
    """What fits a budget: as an earlier process found it, or planned now; `wanted` is None for a whole step."""
    step = step_of(function, wanted, wishes.options)
    if any(map(_compat.split_by_compiler, function.leaves.arrays)):
        return _split_search(step, function, wanted, wishes)
    # Scans stay as they are in what a plan is known by; how they run is part of the plan.
    outline = outline_of(step if step.scans is None else replace(step, planned=step.function))
    known = KnownPlan.of(outline, function.leaves.shapes(), wishes.budget, wishes.asked, wishes.options)
    before = known.read()
    prepared = None if before is None else _checked(before, function, wanted, wishes)
    if prepared is None:
        model = model_of(step, outline=outline if step.scans is None else None)
        is_share = wishes.budget.unit is BudgetUnit.PLAIN_FRACTION
        prepared = _searched(step, model, plain_memory(step, model) if is_share else None, function, wishes)
        known.write(prepared.plan)
    return prepared


def _split_search(step: FlatStep, function: FlatFunction, wanted: Sequence[bool] | None, wishes: Wishes) -> Prepared:
    """Of a step whose arrays lie on several devices: XLA tells what each of them holds."""
    step = replace(step, placed=function.leaves.placed, share=function.leaves.share(wanted or ()))
    plain = plain_memory(step, model_of(step))
    step = replace(step, resident_bytes=plain.argument_bytes + plain.result_bytes - plain.shared_bytes)
    return _searched(step, model_of(step), plain, function, wishes)


def _searched(
    step: FlatStep, model: Model, plain: StepMemory | None, function: FlatFunction, wishes: Wishes
) -> Prepared:
    """Solve, compile, correct."""
    allowed = allowed_bytes(model, wishes.budget, plain)
    found = search(step, model, allowed, wishes.asked)
    plan = plan_from(function.leaves, found, allowed, plain)
    return Prepared(plan, found.model, found.replay, found.means, found.compilations, found.memory)


def _checked(plan: Plan, function: FlatFunction, wanted: Sequence[bool] | None, wishes: Wishes) -> Prepared | None:
    """What an earlier process found, compiled once; None where it no longer fits."""
    try:
        found = prepare_from(plan, function, wanted, wishes)
    except PlanMismatch:
        return None
    model, pull = found.model, replayed(found.replay, found.means)
    assert plan.compiled is not None, "plans of jax are of compiled steps"
    memory = memory_of(compile_step(pull, function.leaves.avals, model.cotangents(), wishes.options))
    peak = model.resident_total + memory.temporary_bytes
    if peak > plan.budget_bytes:
        return None
    plan = replace(plan, compiled=replace(plan.compiled, peak_bytes=peak))
    return Prepared(plan, model, found.replay, found.means, 1, memory)


def prepare_from(plan: Plan, function: FlatFunction, wanted: Sequence[bool] | None, wishes: Wishes) -> Prepared:
    """What runs under a plan that was made before; refused where it was made for something else."""
    given = plan.compiled.scans if plan.compiled is not None else ()
    step = step_of(function, wanted, wishes.options, given=given)
    # What ops take was known when the plan was made.
    model = model_of(step, stopwatch(default_device(), 0.0))
    check_fingerprint(plan, fingerprint_of(function.leaves, model))
    if plan.schedule is None:
        raise PlanMismatch(f"The plan is {plan.status.value}: it has no schedule to run; plan again with more memory.")
    is_held = plan.compiled is not None and plan.compiled.held
    means = model.means if is_held else means_of(model, plan.schedule)
    return Prepared(plan, model, model.replay(plan.schedule), means, 0, None)


def step_of(
    function: FlatFunction,
    wanted: Sequence[bool] | None,
    options: Mapping[str, Any] | None,
    *,
    plan_scans: bool = True,
    given: tuple[PlannedScan, ...] | None = None,
) -> FlatStep:
    """What is to be planned; refused where nothing is differentiated. Scans are planned, or run as `given`."""
    if wanted is None:
        return FlatStep(function, function, function.leaves.avals, None, None, options)
    if not any(wanted):
        raise CaptureError("None of the arguments that are differentiated is an array of floats.")
    avals = function.leaves.avals
    # Tracing also tells how many of the results are followed.
    traced = trace(function, avals)
    if not (plan_scans and has_scans(traced.jaxpr)):
        return FlatStep(function, function, avals, tuple(wanted), function.followed, options)
    if given is not None:
        known = GivenScans(stopwatch(default_device(), 0.0), given, means_for(platform()))
        planned = with_planned_scans(traced, known)
        return FlatStep(function, planned, avals, tuple(wanted), function.followed, options)
    means = means_for(platform())
    # Barriers cost nothing, but whether they hold inside loops is for the compiler's account to say.
    scans = ScanPlans(stopwatch(default_device()), heavy=means if means is Means.CONDITIONALS else Means.NOTHING)
    planned = with_planned_scans(traced, scans)
    return FlatStep(function, planned, avals, tuple(wanted), function.followed, options, scans)


def allowed_bytes(model: Model, budget: Budget, plain: StepMemory | None) -> int:
    """Of temporary memory."""
    if plain is not None and budget.unit is BudgetUnit.PLAIN_FRACTION:
        return int(budget.amount * plain.temporary_bytes)
    if budget.unit is BudgetUnit.DEVICE_FRACTION:
        return int(budget.amount * _device_bytes()) - model.resident_total
    return int(budget.amount) - model.resident_total


def _device_bytes() -> int:
    stats = default_device().memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise BudgetError('This jax backend does not tell how much memory it has; write "8GiB" or "0.6x".')
    return int(stats["bytes_limit"])


def plan_from(leaves: Leaves, found: Found, allowed: int, plain: StepMemory | None) -> Plan:
    """The plan that every report reads; its peak is that of the compiled step."""
    model, solution = found.model, found.solution
    resident = model.resident_total
    compiled = CompiledStep(
        peak_bytes=resident + found.memory.temporary_bytes,
        time_ns=solution.time_ns,
        cuts=(CompiledCut(saved=_saved_names(found)),),
        scans=found.scans,
        held=found.means is not Means.NOTHING,
    )
    return Plan(
        problem=model.problem.with_budget(resident + allowed),
        solution=solution,
        fingerprint=fingerprint_of(leaves, model),
        plain_peak_bytes=resident + (plain.temporary_bytes if plain else _predicted_plain(model)),
        breakdown_bytes=model.resident,
        compiled=compiled,
    )


def plain_plan(leaves: Leaves, model: Model) -> Plan:
    """The step as it is, without a limit and without a compiler's word: what profiles and curves start from."""
    schedule = plain_schedule(model.contracted.graph)
    timeline = simulate(model.problem, schedule)
    problem = model.problem.with_budget(timeline.peak_bytes)
    return Plan(
        problem=problem,
        solution=judge(problem, schedule, "none"),
        fingerprint=fingerprint_of(leaves, model),
        plain_peak_bytes=timeline.peak_bytes,
        breakdown_bytes=model.resident,
    )


def _predicted_plain(model: Model) -> int:
    return simulate(model.problem, plain_schedule(model.contracted.graph)).peak_bytes - model.resident_total


def _saved_names(found: Found) -> tuple[str, ...]:
    contracted = found.model.contracted
    ops = contracted.graph.ops
    maker = {number: ops[step].name for step, work in enumerate(contracted.work) for number in work.makes}
    return tuple(dict.fromkeys(maker[number] for number in found.replay.saved))


def fingerprint_of(leaves: Leaves, model: Model) -> Fingerprint:
    device = default_device()
    graph = model.contracted.graph
    return Fingerprint(
        graph_hashes=(graph_hash(graph, value_sizes(model.contracted)),),
        torch_version=f"jax {jax.__version__}",
        device=f"{device.platform} {device.device_kind}",
        shapes=leaves.shapes(),
    )
