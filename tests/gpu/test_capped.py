"""A planned step on a CUDA device, with the allocator held to its plan."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.pytorch._compat.memory import expandable_segments

pytestmark = pytest.mark.gpu


def step(run: Any, example: zoo.Example) -> torch.Tensor:
    torch.manual_seed(3)
    loss = run(*example.args, **example.kwargs)
    loss.backward()
    example.model.zero_grad(set_to_none=True)
    return loss.detach()


def test_reserved_memory_stays_at_the_plan() -> None:
    example = zoo.build("gpt", device="cuda", scale="demo")
    example.model.train()
    run = remat.optimize(example.model, "0.6x", progress=False, time_limit=5.0)
    free = step(run, example)
    plan = remat.plan_of(run)
    before = torch.cuda.get_per_process_memory_fraction()
    gc.collect()
    torch.cuda.empty_cache()
    # Segments are taken in pieces of 20 MiB: a small model's plan needs room for some.
    with remat.capped(run, slack=max(0.02, 80 * 2**20 / plan.predicted_peak)) as limit:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            assert torch.equal(step(run, example), free)
        assert torch.cuda.max_memory_reserved() <= limit
    assert torch.cuda.get_per_process_memory_fraction() == before
    assert not expandable_segments()
