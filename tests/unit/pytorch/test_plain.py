"""The peak of plain eager, found without running it, is what eager really takes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.nets import WIDTH, Loss, Stack, batch, stack
from tests.support.steps import training_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import remat
from remat.pytorch.plain import PlainStep, loss_like
from remat.zoo import Example


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu_(layer(x).add_(1.0))
        return x


class Saves(nn.Module):
    """Needs more at the end of forward than in backward, and checkpoints half of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(3), Stack(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False)).repeat(1, 8)


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 4))


def _frozen() -> nn.Module:
    model = Stack(4)
    model.layers[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [Stack, InPlace, _normed, _frozen, Saves])
def test_plain_peak_is_what_eager_takes(make) -> None:
    example = Example(Loss(make()), (batch(),))
    plan = remat.plan(example.model, *example.args, budget="50x", solver="none")
    measured = remat.measure(training_step(example.model, example)).peak_bytes
    # Small buffers that live inside one kernel, and generator states that `checkpoint` keeps.
    assert plan.plain_peak_bytes == pytest.approx(measured, rel=0.004)


def test_share_budget_is_a_share_of_the_plain_peak() -> None:
    plan = remat.plan(stack(), batch(), budget="0.8x", time_limit=1)
    assert plan.budget_bytes == int(0.8 * plan.plain_peak_bytes)


def test_scalars_are_taken_for_the_loss() -> None:
    loss, features = torch.ones((), requires_grad=True), torch.ones(3, requires_grad=True)
    assert loss_like([features, loss]) == [loss]
    assert loss_like([features, torch.ones(())])[0] is features
    assert loss_like([torch.ones(())]) == []


def test_workspace_is_found_for_calls_that_differ_in_layout_only() -> None:
    call = "aten.sum.dim_IntList(bfloat16[8, 4][4, 1]cpu, [0], True; )"
    other = "aten.sum.dim_IntList(bfloat16[8, 4][1, 8]cpu, [0], False; )"
    longer = "aten.sum.dim_IntList(bfloat16[16, 4][4, 1]cpu, [0], True; )"
    step = PlainStep(((call, 100), (longer, 90)), resident_bytes=10, held_bytes=20)
    assert step.peak_bytes({other: 7}) == 107
    assert step.peak_bytes({other: 7, longer: 30}) == 120
    assert step.peak_bytes({other: 7, call: 1}) == 101
