"""Guarded steps, online rematerialization and micro-batches on a CUDA device."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat

pytestmark = pytest.mark.gpu


def layers(count: int = 8, width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    made = (part for _ in range(count) for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)))
    return nn.Sequential(*made).cuda()


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().mean().backward()
    return [item.grad.clone() for item in model.parameters()]


def test_online_gradients_are_the_same_within_half_the_memory() -> None:
    model, x = layers(), torch.randn(8192, 512, device="cuda")
    expected = run(model, x)
    with remat.dtr(10**12) as whole:
        run(model, x)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with remat.dtr(int(0.6 * whole.peak_bytes)) as online:
        torch.manual_seed(1)
        model(x).square().mean().backward()
    assert online.evictions > 0
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * online.budget_bytes
    assert all(map(torch.equal, expected, (item.grad for item in model.parameters())))


def test_device_that_is_too_small_runs_in_parts() -> None:
    model, plain = (nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).cuda() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(65536, 512, device="cuda"), torch.randint(512, (65536,), device="cuda")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    F.cross_entropy(plain(x), y).backward()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 700 * 2**20) / total)
    guard = remat.guarded(step)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guard(x, y)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("parts" in words for words in guard.changes)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
