"""From a functional Keras model to the plan of its layers' calls.

In: the model, the shapes of one batch, and a budget. Out: a `LayerPlan`. Everything is told by shapes, so that its
peak is an estimate. "0.6x" is of the estimate for a plain step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from remat.core.budget import Budget, BudgetUnit
from remat.core.files.plan_file import graph_hash
from remat.core.memory_rules import CPU
from remat.core.problem import Problem
from remat.core.results.plan import Fingerprint, Plan
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import BudgetError, CaptureError
from remat.keras._compat import LayerCalls, calls_of, take_added_losses
from remat.keras.layers.call import CallFacts
from remat.keras.layers.facts import facts_of
from remat.keras.layers.problem import LayerProblem, layer_problem
from remat.keras.layers.times import call_times
from remat.within import fit_within


@dataclass(frozen=True, slots=True)
class SolverWishes:
    solver: str
    time_limit_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    calls: LayerCalls
    plan: Plan
    forward: tuple[int, ...]
    """Calls in the order in which they run before the loss."""
    backward: tuple[tuple[bool, int], ...]
    """After it: whether it is a backward, and of which call."""
    stateful: tuple[str, ...]
    """Calls that are never made again, because a second run would change something a second time."""


@dataclass(frozen=True, slots=True)
class LayerModel:
    """A model's calls as a problem."""

    calls: LayerCalls
    facts: tuple[CallFacts, ...]
    layers: LayerProblem
    specs: tuple[Any, ...]

    @property
    def plain_bytes(self) -> int:
        problem = self.layers.problem
        return simulate(problem, plain_schedule(problem.graph)).peak_bytes


def model_layers(functional: Any, specs: Sequence[Any], is_jit: bool) -> LayerModel:
    """Trace the model for inputs like `specs` and time its calls; refused where it cannot be planned."""
    calls = calls_of(functional)
    facts = facts_of(calls, specs)
    added = take_added_losses(functional)
    if added:
        raise CaptureError(f"`{added[0]}` adds a loss when it is called")
    if not any(fact.has_gradient for fact in facts):
        raise CaptureError("nothing in it is differentiated")
    times = call_times(calls, facts, _all_specs(calls, facts, specs), is_jit)
    take_added_losses(functional)
    return LayerModel(calls, facts, layer_problem(facts, calls.outputs, times), tuple(specs))


def plan_layers(model: LayerModel, budget: Budget, wishes: SolverWishes) -> LayerPlan:
    """The fastest schedule whose estimate is within the budget."""
    layers = model.layers
    plain_bytes = model.plain_bytes
    problem = layers.problem.with_budget(allowed_bytes(budget, plain_bytes))
    fitted = fit_within(
        problem,
        wishes.solver,
        rules=CPU,
        tidy=layers.repaired,
        time_limit_s=wishes.time_limit_s,
        seed=wishes.seed,
    )
    solution = _as_repaired(problem, fitted.solution)
    assert solution.schedule is not None
    forward, after = layers.split(solution.schedule)
    backward = tuple((step in layers.backward_of, layers.backward_of.get(step, step)) for step in after)
    plan = Plan(problem, solution, _fingerprint(model), plain_bytes)
    stateful = tuple(fact.name for fact in model.facts if fact.has_state)
    return LayerPlan(model.calls, plan, forward, backward, stateful)


def allowed_bytes(budget: Budget, plain_bytes: int) -> int:
    if budget.unit is BudgetUnit.DEVICE_FRACTION:
        raise BudgetError('TensorFlow does not tell how much memory a device has; write "8GiB" or "0.6x".')
    return budget.resolve(plain_peak_bytes=plain_bytes, device_bytes=0)


def _as_repaired(problem: Problem, solution: Solution) -> Solution:
    """With the time of what was added, so that calls are made from what is there."""
    assert solution.schedule is not None
    time = simulate(problem, solution.schedule).time_ns
    status = solution.status if time <= solution.time_ns else Status.FEASIBLE
    return replace(solution, time_ns=time, status=status)


def _all_specs(calls: LayerCalls, facts: Sequence[CallFacts], specs: Sequence[Any]) -> Mapping[int, Any]:
    found = dict(zip(calls.inputs, specs, strict=True))
    for fact in facts:
        found.update(zip(fact.makes, fact.specs, strict=True))
    return found


def _fingerprint(model: LayerModel) -> Fingerprint:
    problem = model.layers.problem
    return Fingerprint(
        graph_hashes=(graph_hash(problem.graph, problem.costs.size_bytes),),
        torch_version=f"tensorflow {tf.__version__}",
        device="gpu" if tf.config.list_physical_devices("GPU") else "cpu",
        shapes=tuple(f"{spec.dtype.name}{list(spec.shape)}" for spec in model.specs),
    )
