"""Solvers of every kind plan a real step, and the step keeps eager's bits and its budget."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.support.steps import differences, record, snapshot, training_step

import remat
from remat import zoo


@pytest.mark.parametrize("solver", ["tree_dp", "chain_dp", "dtr", "mu_two", "genetic", "revolve", "every_n"])
def test_zoo_mlp_trains_under_the_plan_of(solver: str) -> None:
    example = zoo.build("mlp")
    buffers = snapshot(example.model)
    optimized = remat.optimize(example.model, "0.75x", solver=solver, time_limit=2)
    eager, found = record(example.model, example, buffers), record(optimized, example, buffers)
    assert differences(eager, found) == []
    plan = remat.plan_of(optimized)
    assert plan.schedule.recomputed()
    assert remat.measure(training_step(optimized, example)).peak_bytes <= plan.budget_bytes
