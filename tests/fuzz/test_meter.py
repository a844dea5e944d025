"""The second meter counts what torch's allocator hands out, and agrees with `remat.measure` where that is right."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from tests.fuzz import meter
from torch import nn

import remat

pytestmark = pytest.mark.skipif(bool(meter.why_not()), reason=f"no second meter: {meter.why_not()}")


def open_meter() -> meter.Meter:
    """A meter, with nothing left that a collection could free meanwhile."""
    gc.collect()
    found = meter.open_meter()
    assert found is not None
    return found


def test_counts_allocations_and_frees_to_the_byte() -> None:
    gauge, kept = open_meter(), torch.empty(1000)
    start = gauge.begin()
    first, second = torch.empty(250), torch.empty(10, 10)
    del first
    third = torch.empty(50)
    assert gauge.peak_bytes() - start == 1400
    assert gauge.begin() - start == 600
    del second, third, kept
    assert gauge.begin() - start == -4000


def test_counts_what_a_kernel_takes_for_a_while() -> None:
    gauge, x = open_meter(), torch.randn(64, 64)
    start = gauge.begin()
    x.t().softmax(0)
    assert gauge.peak_bytes() - start >= x.nbytes


def test_follows_many_blocks_at_once() -> None:
    gauge = open_meter()
    start = gauge.begin()
    blocks = [torch.empty(number % 7 + 1) for number in range(100_000)]
    assert gauge.peak_bytes() - start == sum(block.nbytes for block in blocks)
    del blocks
    assert gauge.begin() == start


def test_does_not_count_memory_of_python_or_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    gauge = open_meter()
    start = gauge.begin()
    torch.from_numpy(numpy.zeros(10_000))
    bytearray(10_000)
    assert gauge.peak_bytes() == start


def test_agrees_with_a_first_measurement_of_a_module() -> None:
    gauge = open_meter()
    module, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.randn(128, 64)
    peaks = []

    def step(module: nn.Module, x: torch.Tensor) -> None:
        start = gauge.begin()
        module(x).square().mean().backward()
        peaks.append(gauge.peak_bytes() - start)
        module.zero_grad(set_to_none=True)

    found = remat.measure(step, module, x)
    present = sum(parameter.nbytes for parameter in module.parameters()) + x.nbytes
    assert peaks == [found.peak_bytes - present] * 2
