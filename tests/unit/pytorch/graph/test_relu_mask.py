"""ReLUs whose backward reads a mask: the same bits, less memory, and only where nothing else reads their result."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.steps import same_bits
from torch import nn

import remat
from remat.core.eager import as_eager
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.pytorch import ops
from remat.pytorch.measure.measure_step import measure_once

aten = torch.ops.aten
MASKS = "remat.relu_mask.default"


def check(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    special = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45])
    input, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    for item in (input, grad):
        item.view(-1)[: len(special)] = special[torch.randperm(len(special), generator=generator)][: item.numel()]
    for turned in (False, True):
        left, right = ((item.transpose(0, -1) if turned else item).to(device, dtype) for item in (input, grad))
        result = aten.relu(left)
        mask = torch.ops.remat.relu_mask(result)
        expected = aten.threshold_backward(right, result, 0)
        found = torch.ops.remat.relu_backward(right, mask)
        assert mask.dtype is torch.bool
        assert same_bits(expected, found)
        assert expected.stride() == found.stride()
        torch.ops.remat.relu_backward.out(right, mask, out=right)
        assert same_bits(expected, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (40, 5), (3, 4, 5, 6), (17, 2, 33)])
def test_masks_give_eager_bits(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch) -> None:
    check(shape, dtype, "cpu")
    monkeypatch.setattr(ops, "SMALLEST_PIECE", 1)
    check(shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 5), (17, 2, 33)])
def test_masks_give_eager_bits_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(shape, dtype, "cuda")


class Net(nn.Module):
    """Two convolutions; what comes between them reads the first one's ReLU."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(16 if between == "concatenated" else 8, 4, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm(self.first(input)))
        if self.between == "pooled":
            features = F.max_pool2d(features, 2)
        elif self.between == "concatenated":
            features = torch.cat([features, features.flip(0)], dim=1)
        elif self.between == "viewed":
            features = features.view(features.shape[0], 8, -1, 1)
        elif self.between == "multiplied":
            features = features * features.mean((2, 3), keepdim=True)
        return self.second(features).square().mean()


@pytest.mark.parametrize(
    ("between", "is_masked"),
    [("pooled", True), ("concatenated", True), ("nothing", False), ("viewed", False), ("multiplied", False)],
)
def test_a_mask_is_kept_only_where_nothing_else_reads_the_result(between: str, is_masked: bool) -> None:
    torch.manual_seed(3)
    model, input = Net(between), torch.randn(16, 3, 24, 24)
    optimized = remat.optimize(copy.deepcopy(model), "1x")
    assert remat.verify(model, optimized, input).ok
    plan = remat.plan_of(optimized)
    assert (MASKS in {op.target for op in plan.problem.graph.ops}) is is_masked
    assert remat.measure(optimized, input).peak_bytes == plan.predicted_peak <= plan.budget_bytes


def test_the_plain_peak_does_not_count_on_masks() -> None:
    torch.manual_seed(3)
    model, input = Net("concatenated"), torch.randn(16, 3, 24, 24)
    optimized = remat.optimize(copy.deepcopy(model), "1x")
    optimized(input).backward()
    plan = remat.plan_of(optimized)
    plain, eager = measure_once(model, input).peak_bytes, as_eager(plan.problem)
    assert plan.plain_peak_bytes == pytest.approx(plain, rel=0.01)
    assert simulate(eager, plain_schedule(eager.graph)).peak_bytes == pytest.approx(plain, rel=0.01)
