"""Training one model plainly and under a budget, step by step alike: what the demo runs and verify repeats.

In: a model with its batch. Out: losses, and a `TrainingComparison` with the live bytes of one step of each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remat.core.budget import format_bytes
from remat.core.results.plan import Plan
from remat.errors import InfeasibleBudget
from remat.report.tables.training import TrainingComparison
from remat.zoo import Example

_TIMED_STEPS = 3
_LEARNING_RATE = 1e-3
_ABOVE_FLOOR = 1.05
"""Where the budget asked for cannot be had, what to take, over the least that can: at that itself a step is slow."""

Make = Callable[[], Example]
"""Builds a model and its batch, the same every time."""


# No slots: `measure` finds a step's tensors through the attributes of the object it belongs to.
@dataclass(frozen=True)
class Trainee:
    """A model, the batch it is trained on, and its optimizer."""

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    optimizer: Any

    @staticmethod
    def plain(example: Example) -> Trainee:
        import torch

        # Fused: the update of a parameter then has no temporaries, which would only blur the picture of the step.
        optimizer = torch.optim.AdamW(example.model.parameters(), lr=_LEARNING_RATE, fused=True)
        return Trainee(example.model, example.args, dict(example.kwargs), optimizer)

    def under(self, budget: str, solver: str = "auto") -> Trainee:
        """The same parameters and optimizer, within a budget that also covers the optimizer's state."""
        import remat

        return replace(self, model=remat.optimize(self.model, budget, optimizer=self.optimizer, solver=solver))

    def train_step(self, seed: int) -> float:
        """One optimizer step whose random numbers depend on `seed` only."""
        import torch

        torch.manual_seed(seed)
        loss = self.model(*self.args, **self.kwargs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


@dataclass(frozen=True, slots=True)
class Compared:
    """A finished comparison with what its picture needs."""

    facts: TrainingComparison
    plan: Plan
    plain_timeline: tuple[int, ...]
    planned_timeline: tuple[int, ...]


def compare_training(
    name: str, make: Make, *, steps: int, device: str, budget: str, seed: int, or_least: bool = False
) -> Compared:
    """Train what `make` builds twice from the same weights; only one of the two is in memory while it is measured.

    With `or_least`, a model that cannot be trained within `budget` on this device is trained within what it can.
    """
    import remat

    plain_losses, plain = _train_plainly(make, steps=steps, seed=seed)
    planned = Trainee.plain(make()).under(budget)
    note = ""
    try:
        first_seconds, first_loss = _timed(planned, seed)
    except InfeasibleBudget as error:
        if not or_least:
            raise
        least = int(_ABOVE_FLOOR * error.min_budget)
        note = f"{budget} cannot be had on this device, so {format_bytes(least)} was the budget: {error}"
        remat.set_budget(planned.model, least)
        first_seconds, first_loss = _timed(planned, seed)
    losses = (first_loss, *(planned.train_step(seed + step) for step in range(1, steps)))
    measured = remat.measure(planned.train_step, seed)
    plain_seconds, planned_seconds = _time_both(make, planned, seed=seed)
    plan = remat.plan_of(planned.model)
    facts = TrainingComparison(
        model=name,
        device=device,
        plain_losses=plain_losses,
        planned_losses=losses,
        budget_bytes=plan.budget_bytes,
        plain_peak_bytes=plain.peak_bytes,
        predicted_peak_bytes=plan.predicted_peak,
        measured_peak_bytes=measured.peak_bytes,
        plain_seconds=plain_seconds,
        planned_seconds=planned_seconds,
        planning_seconds=max(0.0, first_seconds - planned_seconds),
        solver=plan.solution.solver,
        status=plan.status.value,
        gap=plan.gap,
        note=note,
    )
    return Compared(facts, plan, tuple(plain.timeline), tuple(measured.timeline))


def _train_plainly(make: Make, *, steps: int, seed: int) -> tuple[tuple[float, ...], Any]:
    """The losses, and the measurement of one more step."""
    import remat

    trainee = Trainee.plain(make())
    losses = tuple(trainee.train_step(seed + step) for step in range(steps))
    return losses, remat.measure(trainee.train_step, seed)


def _timed(trainee: Trainee, seed: int) -> tuple[float, float]:
    start = time.perf_counter()
    loss = trainee.train_step(seed)
    return time.perf_counter() - start, loss


def _time_both(make: Make, planned: Trainee, *, seed: int) -> tuple[float, float]:
    """Median seconds of a plain and a planned step, taken in turns so that a busy machine slows both alike."""
    plain = Trainee.plain(make())
    plain.train_step(seed)
    pairs = [(_timed(plain, seed)[0], _timed(planned, seed)[0]) for _ in range(_TIMED_STEPS)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)
