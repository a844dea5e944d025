"""How many samples fit a budget, predicted from the curves of `remat.max_batch_size`.

In: a model with its batch, and a budget. Out: a `BatchLimit`. The step is captured at a few sizes on fake tensors, laws
tell its plain peak at every other one (see `explore/scaling.py`), and nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from remat.core.budget import Budget, format_bytes
from remat.core.problem import Costs
from remat.core.search.largest import largest
from remat.errors import InfeasibleBudget
from remat.pytorch.device import total_bytes
from remat.pytorch.explore.max_batch import sample_sizes
from remat.pytorch.explore.resize import resized, size_along
from remat.pytorch.explore.scaling import DEGREES, Optimizers, Scaling, scale
from remat.pytorch.graph.capture import Captured
from remat.pytorch.reach import reachable_from, tensors_within
from remat.zoo.example import Example


@dataclass(frozen=True, slots=True)
class BatchLimit:
    """The curve of a step's plain peak over its batch, and a budget."""

    peak_at: Callable[[int], int]
    budget_bytes: int
    sample_bytes: int
    """What a sample takes as an argument of the step."""
    gradient_bytes: int
    """What gradients of an earlier micro-batch take while the next one runs."""

    def peak_bytes(self, size: int, whole: int = 0) -> int:
        """The plain peak at a batch of `size`, as a part of `whole` samples whose gradients are added up, if given."""
        beside = (whole - size) * self.sample_bytes + self.gradient_bytes if whole > size else 0
        return self.peak_at(size) + beside

    def fits(self, size: int, whole: int = 0) -> bool:
        return self.peak_bytes(size, whole) <= self.budget_bytes

    def largest(self, guess: int, whole: int = 0) -> int:
        """The largest batch that fits; raises `InfeasibleBudget` where one sample does not."""
        found = largest(lambda size: self.fits(size, whole), guess, 1)
        if not found:
            least = self.peak_bytes(1, whole)
            raise InfeasibleBudget(
                f"Budget {format_bytes(self.budget_bytes)} is below the {format_bytes(least)} that one sample needs; "
                "raise the budget or make the samples smaller.",
                least,
            )
        return found


def batch_limit(example: Example, budget: Budget, optimizers: Optimizers) -> BatchLimit:
    """Captures the step at a few sizes around that of the example."""
    usual = size_along(example, "batch")
    scaling = scale(
        lambda size: resized(example, "batch", size),
        sample_sizes(usual, 1),
        degree=DEGREES["batch"],
        optimizers=optimizers,
        measure=_without_times,
    )
    reached = reachable_from(example.model, example.args, dict(example.kwargs))
    allowed = budget.resolve(
        plain_peak_bytes=scaling.at(usual).plain_peak_bytes, device_bytes=total_bytes(reached.device())
    )
    given = [item for item in tensors_within((list(example.args), dict(example.kwargs))) if item.dim()]
    sample = sum(item.nbytes for item in given if len(item) == usual) // usual
    gradients = sum(_gradient_bytes(item) for item in reached.tensors["parameters"].values())
    return BatchLimit(_curve(scaling), allowed, sample, gradients)


def _curve(scaling: Scaling) -> Callable[[int], int]:
    law = scaling.law
    if law is not None and law.is_exact:
        # Without the example, whose batch would stay in memory.
        return law.plain_peak_bytes
    return lambda size: scaling.capture(size).plain_peak_bytes


def _gradient_bytes(parameter: torch.Tensor) -> int:
    return parameter.untyped_storage().nbytes() if parameter.requires_grad else 0


def _without_times(captured: Captured) -> Costs:
    """The plain peak is made of bytes alone: no op has to be timed for it."""
    count: Any = len(captured.graph.ops)
    return Costs((0.0,) * count, (0,) * count, tuple(captured.size_bytes))
