"""Budgets that count the arena: planned, kept, applied and run with real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import remat
from remat import zoo
from remat.core.budget import BudgetScope
from remat.errors import BudgetError
from remat.layout.arena import check_arena


@pytest.fixture(scope="module")
def example() -> zoo.Example:
    return zoo.build("mlp")


def plan_of(example: zoo.Example, count: str) -> remat.Plan:
    return remat.plan(example.model, *example.args, budget="0.6x", count=count, time_limit=2.0, **example.kwargs)


@pytest.mark.parametrize("count", ["live", "arena"])
def test_a_plan_says_what_was_counted_and_has_its_arena(example: zoo.Example, count: str, tmp_path: Path) -> None:
    plan = plan_of(example, count)
    assert plan.counts is BudgetScope(count)
    assert plan.arena is not None and plan.schedule is not None and plan.arena_bytes is not None
    check_arena(plan.problem, plan.schedule, plan.arena)
    assert plan.solution.peak_bytes <= plan.arena_bytes <= 1.02 * plan.solution.peak_bytes
    if count == "arena":
        assert plan.arena_bytes <= plan.budget_bytes
    plan.save(tmp_path / "plan.json")
    assert remat.Plan.load(tmp_path / "plan.json") == plan


def test_a_step_under_a_counted_arena_trains_as_before(example: zoo.Example) -> None:
    optimized = remat.optimize(example.model, "0.6x", count="arena", time_limit=2.0)
    assert remat.verify(example.model, optimized, *example.args, steps=2, **example.kwargs).ok
    plan = remat.plan_of(optimized)
    assert plan.counts is BudgetScope.ARENA
    assert plan.arena_bytes is not None and plan.arena_bytes <= plan.budget_bytes


def test_what_cannot_be_counted_is_refused(example: zoo.Example) -> None:
    with pytest.raises(BudgetError, match="'live' or 'arena'"):
        remat.optimize(example.model, "0.6x", count="pages")
    with pytest.raises(BudgetError, match="live bytes, not its arena"):
        remat.optimize(example.model, "0.6x", count="arena", compiler="inductor")


def test_the_backend_takes_a_count(example: zoo.Example) -> None:
    compiled = torch.compile(
        example.model, backend="remat", options={"budget": "0.7x", "count": "arena", "time_limit": 2.0}
    )
    compiled(*example.args, **example.kwargs).backward()
    example.model.zero_grad()
