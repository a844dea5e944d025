from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.nets import batch, stack

import remat

KIB = 1024


def test_peak_counts_what_is_there_and_what_comes() -> None:
    weight = torch.zeros(KIB)

    def step() -> None:
        first = weight + 1
        second = first * 2
        del first
        third = second - 1
        del second, third

    found = remat.measure(step)
    # The constants 1 and 2 become tensors of a few bytes on their way into the kernel.
    assert 3 * 4 * KIB <= found.peak_bytes <= 3 * 4 * KIB + 16
    assert max(found.timeline) == found.peak_bytes
    assert found.seconds > 0


def test_temporaries_inside_one_op_count() -> None:
    x = torch.randn(KIB)

    def step() -> None:
        torch.sort(x).values.sum()

    assert remat.measure(step).peak_bytes >= (4 + 4 + 8) * KIB


def test_breakdown_adds_up_to_the_peak() -> None:
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = remat.measure(step, batch())
    assert sum(found.breakdown.values()) == found.peak_bytes
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert found.breakdown["parameters"] == parameters
    assert found.breakdown["inputs"] == batch().numel() * 4
    assert found.breakdown["optimizer state"] > 2 * parameters


def test_module_is_run_forward_and_backward() -> None:
    model = stack()
    found = remat.measure(model, batch())
    assert found.peak_bytes > 6 * batch().numel() * 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_dropped_at_the_start_do_not_count_to_the_end() -> None:
    model = stack()
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).backward()

    def drop_late(x: torch.Tensor) -> None:
        model(x).backward()
        optimizer.zero_grad()

    model.zero_grad()
    late = remat.measure(drop_late, batch())
    early = remat.measure(step, batch())
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert early.timeline[0] == late.timeline[0] + gradients
    assert early.peak_bytes == late.peak_bytes
    assert early.breakdown == late.breakdown
    assert early.peak_bytes == remat.profile(step, batch()).peak_bytes
