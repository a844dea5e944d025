"""Arenas on a CUDA device: whole blocks within the budget, and what the caching allocator reserved beside them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.core.memory_rules import CUDA
from remat.layout.arena import check_arena
from remat.layout.footprint import footprint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_a_counted_arena_fits_the_budget_in_blocks_of_the_allocator(name: str) -> None:
    example = zoo.build(name, device="cuda", scale="demo")
    plan = remat.plan(example.model, *example.args, budget="0.6x", count="arena", time_limit=5.0, **example.kwargs)
    assert plan.arena is not None and plan.schedule is not None and plan.arena_bytes is not None
    check_arena(plan.problem, plan.schedule, plan.arena)
    assert plan.arena.block_bytes == CUDA.address_step_bytes
    assert plan.solution.peak_bytes <= plan.arena_bytes <= plan.budget_bytes


def test_a_profile_tells_what_was_reserved() -> None:
    example = zoo.build("gpt", device="cuda", scale="demo")
    found = footprint(remat.profile(example.model, *example.args, **example.kwargs))
    assert found.reserved_bytes is not None
    assert found.peak_bytes <= found.reserved_bytes
    assert found.peak_bytes <= found.arena_bytes <= found.total_bytes
