"""Pools that keep a byte where eager keeps an index: the same bits, less memory, and a peak that is foreseen."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.steps import same_bits
from torch import nn

import remat
from remat.core.eager import as_eager
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.pytorch import ops
from remat.pytorch.graph.pool_ops import Pool
from remat.pytorch.measure.measure_step import measure_once

aten = torch.ops.aten
VALUES = (-math.inf, -1.0, 0.0, 0.0, 1.0, 2.0, math.inf, math.nan)
"""Few, so that windows have ties, and the ones that compare unlike others."""


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    def pair(largest: int, least: int = 1) -> list[int]:
        return draw(st.lists(st.integers(least, largest), min_size=2, max_size=2))

    kernel = pair(5)
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    return Pool.of(kernel, pair(4), padding, pair(3), draw(st.booleans()))


def images(shape: tuple[int, ...], seed: int, dtype: torch.dtype, channels_last: bool, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.tensor(VALUES)[torch.randint(len(VALUES), shape, generator=generator)]
    # Whole images of nothing but -inf: no element is larger than what a kernel begins with.
    made[0] = -math.inf
    made = made.to(device, dtype)
    return made.contiguous(memory_format=torch.channels_last) if channels_last else made


def check(input: torch.Tensor, pool: Pool) -> None:
    output, indices = aten.max_pool2d_with_indices(input, *pool.args)
    grad = torch.randn(output.shape, device=input.device).to(input.dtype)
    expected = aten.max_pool2d_with_indices_backward(grad, input, *pool.args, indices)
    found, offsets = torch.ops.remat.max_pool2d(input, *pool.args)
    assert offsets.dtype is torch.uint8
    assert same_bits(output.flatten(), found.flatten())
    gradient = torch.ops.remat.max_pool2d_backward(grad, offsets, expected.shape, expected.stride(), *pool.args)
    assert same_bits(expected.flatten(), gradient.flatten())
    assert (output.stride(), expected.stride()) == (found.stride(), gradient.stride())


def is_possible(input: torch.Tensor, pool: Pool) -> bool:
    """Whether torch accepts these arguments, and we do."""
    try:
        output, _ = aten.max_pool2d_with_indices(input, *pool.args)
    except RuntimeError:
        return False
    return pool.fits_a_byte(input.shape[2:], output.shape[2:])


def check_any(pool: Pool, data: Any, device: str) -> None:
    shape = (data.draw(st.integers(1, 20)), data.draw(st.integers(1, 3)), *(data.draw(st.integers(1, 12)),) * 2)
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
    input = images((*shape[:3], shape[3] + 1), data.draw(st.integers(0, 9)), dtype, data.draw(st.booleans()), device)
    assume(is_possible(input, pool))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "SMALLEST_PIECE", data.draw(st.sampled_from((1, ops.SMALLEST_PIECE))))
        check(input, pool)


@given(pools(), st.data())
def test_bytes_give_eager_bits(pool: Pool, data: st.DataObject) -> None:
    check_any(pool, data, "cpu")


def test_a_batch_of_nothing() -> None:
    check(torch.empty(0, 2, 8, 8), Pool.of(2))


@pytest.mark.parametrize("exact", [0, 2**24])
@pytest.mark.parametrize("kernel", [(3, 3), (8, 16), (15, 17)])
def test_large_windows_and_images_whose_indices_are_no_floats(monkeypatch, kernel: tuple[int, int], exact: int) -> None:
    monkeypatch.setattr("remat.pytorch.graph.pool_ops.EXACT", exact)
    check(images((3, 2, 20, 33), 1, torch.float32, False, "cpu"), Pool.of(kernel, 2, 1))


@pytest.mark.gpu
@given(pools(), st.data())
def test_bytes_give_eager_bits_on_a_gpu(pool: Pool, data: st.DataObject) -> None:
    check_any(pool, data, "cuda")


@pytest.mark.parametrize("width", [1021, 65536])
def test_wide_images_give_eager_bits(width: int) -> None:
    check(torch.randn(2, 1, 17, width), Pool.of(15, 3, 7))


def test_a_view_that_is_not_dense_gives_eager_bits() -> None:
    check(torch.randn(4, 3, 12, 20)[:, :, ::2, 1::2], Pool.of(3, 2, 1))


def test_what_does_not_fit_a_byte_is_found() -> None:
    assert Pool.of(15).fits_a_byte((30, 30), (2, 2))
    assert not Pool.of(16).fits_a_byte((32, 32), (2, 2))
    # A window wider than the image, and one that has no element of it.
    assert not Pool.of(3, 1, 1).fits_a_byte((2, 2), (2, 2))
    assert not Pool.of((1, 3), 1, (0, 2), (1, 4)).fits_a_byte((9, 2), (9, 1))
    assert not Pool.of(15).fits_a_byte((15, 2**20), (1, 69905))


class Net(nn.Module):
    """Convolutions with a pool behind each; `after` says whether the pool's input is needed for anything else."""

    def __init__(self, after: bool, **how: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.after, self.how = after, how

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for convolution in (self.first, self.second):
            features = convolution(input)
            if self.after:
                input = F.relu(F.max_pool2d(features, **self.how))
            else:
                input = F.max_pool2d(F.relu(features), **self.how)
        return input.square().mean()


def targets_of(model: nn.Module) -> list[str]:
    return [op.target for op in remat.plan_of(model).problem.graph.ops]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "how",
    [dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1, ceil_mode=True), dict(kernel_size=2, dilation=2)],
)
def test_a_step_gives_eager_bits_and_its_peak_is_foreseen(how: dict[str, Any], channels_last, after: bool) -> None:
    torch.manual_seed(3)
    model, input = Net(after, **how), torch.randn(16, 3, 30, 30)
    if channels_last:
        model, input = (item.to(memory_format=torch.channels_last) for item in (model, input))
    optimized = remat.optimize(copy.deepcopy(model), "1x")
    assert remat.verify(model, optimized, input).ok
    plan = remat.plan_of(optimized)
    assert remat.measure(optimized, input).peak_bytes == plan.predicted_peak <= plan.budget_bytes
    pools = {"remat.max_pool2d.default", "remat.max_pool2d_backward.default"}
    assert pools <= set(targets_of(optimized))
    # What eager keeps is put back in another way than the plain step is followed; "1x" must not depend on it.
    eager = as_eager(plan.problem)
    assert simulate(eager, plain_schedule(eager.graph)).peak_bytes == pytest.approx(plan.plain_peak_bytes, rel=0.002)
    if after:
        assert plan.plain_peak_bytes == pytest.approx(measure_once(model, input).peak_bytes, rel=0.002)


class Mean(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).mean()


class Scaled(nn.Module):
    """Keeps its input's layout on every machine, which not every convolution does."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.factors


def test_a_gradient_in_another_layout_is_left_to_eager() -> None:
    torch.manual_seed(3)
    input = torch.randn(16, 3, 30, 30).to(memory_format=torch.channels_last)
    turned = Mean(Scaled(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 15 * 15, 1))
    optimized = remat.optimize(copy.deepcopy(turned), "1x")
    assert remat.verify(turned, optimized, input).ok
    assert "aten.max_pool2d_with_indices.default" in targets_of(optimized)


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        largest, indices = F.max_pool2d(self.convolution(input), 2, return_indices=True)
        return F.max_unpool2d(largest.tanh(), indices, 2).square().mean()


def test_indices_that_others_read_are_kept() -> None:
    torch.manual_seed(3)
    model, input = Unpooled(), torch.randn(4, 1, 8, 8)
    optimized = remat.optimize(copy.deepcopy(model), "1x")
    assert remat.verify(model, optimized, input).ok
    assert "aten.max_pool2d_with_indices.default" in targets_of(optimized)
