"""Small models whose activations dominate, so that every budget below 1x needs recomputation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.support.steps import differences, record, snapshot, training_step
from torch import nn

import remat
from remat.zoo import Example

WIDTH = 32
BATCH = 256


def batch(seed: int = 0, rows: int = BATCH) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


class Stack(nn.Module):
    """Linear, GELU and dropout a few times over; returns its features."""

    def __init__(self, depth: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), self.dropout, self.training) + x
        return x


class Loss(nn.Module):
    """The mean square of what `body` returns."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any) -> torch.Tensor:
        return self.body(*args).square().mean()


def seeded(make: Any, *args: Any, **kwargs: Any) -> Any:
    """A module whose weights do not depend on what ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(*args, **kwargs)


def stack(depth: int = 6, dropout: float = 0.1) -> nn.Module:
    return seeded(lambda: Loss(Stack(depth, dropout)))


def check_like_eager(
    model: nn.Module,
    *args: Any,
    budget: str = "0.6x",
    solver: str = "auto",
    dtype: torch.dtype = torch.float32,
    measured_steps: int = 1,
) -> nn.Module:
    """Optimize `model`; two steps give eager's bits, and the leanest of those measured after them is within budget."""
    example = Example(model, args)
    buffers = snapshot(model)
    eager = record(model, example, buffers, dtype)
    optimized = remat.optimize(model, budget, solver=solver, time_limit=1)
    assert differences(eager, record(optimized, example, buffers, dtype)) == []
    assert differences(eager, record(optimized, example, buffers, dtype)) == []
    step = training_step(optimized, example, dtype)
    measured = min(remat.measure(step).peak_bytes for _ in range(measured_steps))
    assert measured <= remat.plan_of(optimized).budget_bytes
    return optimized


def recomputed_targets(optimized: Any) -> set[str]:
    """Which operators the plan in use runs more than once."""
    plan = remat.plan_of(optimized)
    return {plan.problem.graph.ops[number].target for number in plan.schedule.recomputed()}
