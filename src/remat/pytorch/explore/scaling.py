"""What a step is at sizes nobody has run: the problem as a function of the batch or the sequence length.

In: a function from a size to a model with its batch. Out: a `Scaling`. The step is captured at a few sizes, which uses
fake tensors only, and its ops are measured there. Where all captures are the same graph op by op, and the bytes of all
its values follow polynomials that the last capture confirms, problems at other sizes come from `core.scaled`. Where
they do not, and at size 1, whose tensors have other strides, the size asked for is captured and measured itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from remat.core.files.plan_file import graph_hash
from remat.core.fit import fit, fit_exactly
from remat.core.graph import ValueId
from remat.core.problem import Costs, Problem
from remat.core.scaled import Bytes, ScaledOp, ScaledProblem, fit_bytes
from remat.pytorch.costs.op_costs import profile
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.device import rules_of
from remat.pytorch.graph.capture import Captured
from remat.pytorch.graph.moved import can_move
from remat.pytorch.run.optimize import capture_ahead
from remat.zoo.example import Example

SMALLEST = 2
"""Laws hold from here on: PyTorch treats dimensions of one element in ways of their own."""
DEGREES = {"batch": 1, "length": 2}
"""The highest power of the size that costs grow with, by axis."""

Build = Callable[[int], Example]
Measure = Callable[[Captured], Costs]
Optimizers = Callable[[Any], Sequence[torch.optim.Optimizer]]
"""The optimizers that will update a model, whose state is to be reserved."""


@dataclass(frozen=True, slots=True)
class StepAtSize:
    """A step at one size, its ops not measured yet."""

    captured: Captured
    plain: PlainStep
    resident_bytes: int

    def problem(self, costs: Costs, budget_bytes: int = 0) -> Problem:
        return Problem(self.captured.graph, costs, budget_bytes, self.resident_bytes)

    def plain_peak_bytes(self) -> int:
        """The peak of the same step in plain eager PyTorch."""
        return self.resident_bytes + self.plain.peak_bytes() - self.plain.resident_bytes


@dataclass(frozen=True, slots=True)
class Sized:
    """A step at one size, as a problem."""

    problem: Problem
    plain_peak_bytes: int
    time_error: float
    """By which share of the step the times may be off; 0 where they were measured at this size."""
    movable: tuple[ValueId, ...] = ()
    """Values that may leave the device."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Problems at any size: from laws where there are some, else captured and measured at that size."""

    build: Build
    law: ScaledProblem | None
    reason: str
    """Why there is no law; empty where there is one."""
    optimizers: Optimizers
    measure: Measure
    seen: dict[int, Sized] = field(default_factory=dict)
    """What was captured and measured, by size."""

    def at(self, size: int) -> Sized:
        if size in self.seen:
            return self.seen[size]
        if self.law is None or size < SMALLEST:
            return self.capture(size)
        law, movable = self.law, next(iter(self.seen.values())).movable
        return Sized(law.at(size), law.plain_peak_bytes(size), law.time_error(size), movable)

    def capture(self, size: int) -> Sized:
        """The step at `size` itself, captured and measured."""
        if size not in self.seen:
            example = self.build(size)
            step = capture_step(example, self.optimizers(example.model))
            del example
            self.seen[size] = _sized(step, self.measure(step.captured))
        return self.seen[size]


def capture_step(example: Example, optimizers: Sequence[torch.optim.Optimizer] = ()) -> StepAtSize:
    """The first graph of the step, which for most steps is all of it, and what is resident around it."""
    session = capture_ahead(example.model, example.args, example.kwargs, optimizers)
    variant = session.calls[0].variant
    resident = session.watch.resident_bytes(1, is_whole_step=variant.is_whole_step)
    session.owner.forget()
    return StepAtSize(variant.captured, variant.plain, sum(resident.values()))


def scale(
    build: Build,
    sizes: Sequence[int],
    *,
    degree: int = 2,
    optimizers: Optimizers = lambda model: (),
    measure: Measure = profile,
    tell: Callable[[str], None] = lambda message: None,
) -> Scaling:
    """Capture and measure at `sizes`, which need be one more than the coefficients of a law up to `degree`."""
    steps: list[StepAtSize] = []
    costs: list[Costs] = []
    for size in sizes:
        # The example before must be gone: on CUDA it would count as part of this one.
        gc.collect()
        tell(f"capturing and measuring at {size}")
        example = build(size)
        steps.append(capture_step(example, optimizers(example.model)))
        del example
        costs.append(measure(steps[-1].captured))
    law, reason = _find_law(sizes, steps, costs, degree)
    seen = {size: _sized(step, cost) for size, step, cost in zip(sizes, steps, costs, strict=True)}
    return Scaling(build, law, reason, optimizers, measure, seen)


def _sized(step: StepAtSize, costs: Costs) -> Sized:
    movable = [value for value in can_move(step.captured) if value not in step.captured.graph.outputs]
    return Sized(step.problem(costs), step.plain_peak_bytes(), 0.0, tuple(movable))


def _find_law(
    sizes: Sequence[int], steps: Sequence[StepAtSize], costs: Sequence[Costs], degree: int
) -> tuple[ScaledProblem | None, str]:
    hashes = [graph_hash(step.captured.graph, ()) for step in steps]
    for size, found in zip(sizes, hashes, strict=True):
        if found != hashes[0]:
            return None, f"the graphs captured at {sizes[0]} and {size} are not the same"
    exactly = cache(lambda amounts: fit_exactly(sizes, amounts, degree=degree))
    values = [exactly(amounts) for amounts in _across(step.captured.asked_bytes for step in steps)]
    for value, law in enumerate(values):
        if law is None:
            op = steps[0].captured.graph.ops[steps[0].captured.graph.producers()[value]]
            return None, f"the bytes of `{op.name}` follow no law of degree {degree} over {_listed(sizes)}"
    plain = _plain_ops(sizes, steps, degree)
    if plain is None:
        return None, f"plain PyTorch runs other ops at {_listed(sizes)}"
    fitted = cache(lambda amounts: fit(sizes, amounts, degree=degree))
    whole = cache(lambda amounts: fit_bytes(sizes, amounts, degree=degree))
    scaled = ScaledProblem(
        graph=steps[0].captured.graph,
        times=tuple(map(fitted, _across(cost.time_ns for cost in costs))),
        workspaces=tuple(map(whole, _across(cost.workspace_bytes for cost in costs))),
        values=tuple(law for law in values if law is not None),
        resident=whole(tuple(step.resident_bytes for step in steps)),
        plain=plain,
        grain_bytes=rules_of(steps[0].captured.device).size_step_bytes,
    )
    return scaled, ""


def _plain_ops(sizes: Sequence[int], steps: Sequence[StepAtSize], degree: int) -> tuple[ScaledOp, ...] | None:
    """The plain step's ops; what each kernel works in is measured at every size."""
    if len({len(step.plain.ops) for step in steps}) > 1:
        return None
    whole: Callable[[tuple[int, ...]], Bytes] = cache(lambda amounts: fit_bytes(sizes, amounts, degree=degree))
    needs = _across(step.plain.workspace_bytes(everywhere=True) for step in steps)
    result: list[ScaledOp] = []
    for calls, need in zip(_across(step.plain.ops for step in steps), needs, strict=True):
        if len({call.key.partition("(")[0] for call in calls}) > 1:
            return None
        beyond = tuple(call.live_bytes - step.plain.resident_bytes for call, step in zip(calls, steps, strict=True))
        result.append(ScaledOp(whole(beyond), whole(need)))
    return tuple(result)


def _across(rows: Iterable[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """One tuple for each column."""
    return list(zip(*rows, strict=True))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
