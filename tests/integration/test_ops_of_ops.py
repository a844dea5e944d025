"""Ops that are given ops, such as FlexAttention and `torch.cond`: planned, followed and measured like others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import remat

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Of torch: it cannot trace the backward of `torch.cond` where sizes are followed."""

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Attending(nn.Module):
    """Adds an average of what others are, through which on a CPU no gradient can go."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            q = x.detach().unflatten(2, (4, -1)).transpose(1, 2)
            near = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score - 0.01 * (i - j).abs())
            x = x + near.transpose(1, 2).flatten(2)
        return x.square().mean()


class Choosing(nn.Module):
    """Takes one of two ways by what it sees."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.cond(x.mean() > 0, lambda t: t.relu(), lambda t: t.sin(), (x,))
        return x.square().mean()


def gradients(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    call(x).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def attending() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Attending(), torch.randn(4, 128, 64)


def test_is_planned_with_the_same_bits_and_an_exact_peak(attending: tuple[nn.Module, Tensor]) -> None:
    model, x = attending
    expected = gradients(model, model, x)
    step = remat.optimize(model, "0.9x", time_limit=2, progress=False)
    for _ in range(2):
        assert all(map(torch.equal, gradients(step, model, x), expected))
    plan = remat.plan_of(step)
    assert any("flex_attention" in op.target for op in plan.problem.graph.ops)
    model.zero_grad()
    assert remat.measure(step, x).peak_bytes == plan.predicted_peak <= plan.budget_bytes


def test_plain_peak_is_that_of_eager(attending: tuple[nn.Module, Tensor]) -> None:
    model, x = attending
    measured = remat.measure(model, x).peak_bytes
    model.zero_grad()
    plan = remat.plan(model, x, budget="0.9x", time_limit=2)
    assert plan.plain_peak_bytes == measured


def test_runs_online(attending: tuple[nn.Module, Tensor]) -> None:
    model, x = attending
    expected = gradients(model, model, x)
    model.zero_grad()
    with remat.dtr("8MiB"):
        found = gradients(model, model, x)
    assert all(map(torch.equal, found, expected))


def test_a_profile_sees_what_it_is_made_of(attending: tuple[nn.Module, Tensor]) -> None:
    model, x = attending
    found = remat.profile(model, x)
    assert any("bmm" in op.target or "matmul" in op.target for op in found.ops)
    assert found.peak_bytes == pytest.approx(remat.measure(model, x).peak_bytes, rel=0.02)


@pytest.fixture
def dynamo_as_it_was() -> Iterator[None]:
    """Once it has run under any dispatch mode, torch traces its own code for `torch.cond`, and fails."""
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo_as_it_was")
@pytest.mark.filterwarnings("ignore:The step asks torch.compiler.is_dynamo_compiling")
@pytest.mark.filterwarnings("ignore:A graph of .* nodes runs unplanned.*Mixing fake modes")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_ways_by_value_are_planned_with_the_same_bits_and_an_exact_peak() -> None:
    torch.manual_seed(0)
    model, x = Choosing(), torch.randn(256, 64)
    batches = x, x.neg(), torch.zeros_like(x)
    expected = [gradients(model, model, batch) for batch in batches]
    step = remat.optimize(model, "0.95x", time_limit=2, progress=False)
    for batch, wanted in zip(batches, expected, strict=True):
        assert all(map(torch.equal, gradients(step, model, batch), wanted))
    if not OLD:
        plan = remat.plan_of(step)
        assert any("cond" in op.target for op in plan.problem.graph.ops)
        model.zero_grad()
        assert remat.measure(step, x).peak_bytes == plan.predicted_peak <= plan.budget_bytes
