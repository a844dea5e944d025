"""A pipeline of two ranks within a budget: the same losses and gradients, and what is refused is refused on both."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tests.stacks.two_processes import run_two
from tests.support.nets import Stack

MICROS = 4


def _trained(rank: int, budget: str | int | None) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    import remat
    from remat.distributed import plan_pipeline

    torch.manual_seed(rank)
    module = Stack(5)
    width = next(item.in_features for item in module.modules() if isinstance(item, torch.nn.Linear))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROS, loss_fn=lambda output, target: (output - target).square().mean())
    planned = plan_pipeline(stage, schedule, budget=budget, time_limit=3.0) if budget is not None else None
    batch = torch.randn(4096, width, generator=torch.Generator().manual_seed(7))
    given = ((batch,), {}) if rank == 0 else ((), {"target": torch.zeros(4096, width), "losses": []})
    try:
        schedule.step(*given[0], **given[1])
    except remat.InfeasibleBudget as error:
        return {"refused": str(error)}
    losses = [loss.item() for loss in given[1].get("losses", ())]
    gradients = [item.grad.clone() for item in module.parameters() if item.grad is not None]
    found: dict[str, Any] = {"losses": losses, "gradients": [item.tolist() for item in gradients]}
    if planned is not None:
        found |= {"in_flight": planned.in_flight, "fits": planned.predicted_peak <= planned.budget_bytes}
        found["again"] = sum(plan.overhead for plan in planned.plans.values())
    return found


def _trained_in_two_parts(rank: int, budget: str | None) -> dict[str, Any]:
    """Under a schedule that asks for gradients of inputs first, and for the rest later."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

    from remat.distributed import plan_pipeline

    torch.manual_seed(rank)
    modules = [Stack(3), Stack(3)]
    width = next(item.in_features for item in modules[0].modules() if isinstance(item, torch.nn.Linear))
    stages = [PipelineStage(module, rank + 2 * place, 4, torch.device("cpu")) for place, module in enumerate(modules)]
    schedule = ScheduleInterleavedZeroBubble(
        stages, MICROS, loss_fn=lambda output, target: (output - target).square().mean()
    )
    if budget is not None:
        with pytest.warns(UserWarning, match="ScheduleInterleavedZeroBubble runs backward in two parts"):
            planned = plan_pipeline(stages, schedule, budget=budget, time_limit=3.0)
    batch = torch.randn(4096, width, generator=torch.Generator().manual_seed(7))
    losses: list[torch.Tensor] = []
    for _ in range(2):
        schedule.step(batch) if rank == 0 else schedule.step(target=torch.zeros(4096, width), losses=losses)
    gradients = [item.grad.tolist() for module in modules for item in module.parameters() if item.grad is not None]
    found: dict[str, Any] = {"losses": [loss.item() for loss in losses], "gradients": gradients}
    if budget is not None:
        found |= {"fits": planned.predicted_peak <= planned.budget_bytes, "stages": sorted(planned.plans)}
        found["again"] = sum(plan.overhead for plan in planned.plans.values())
    return found


def _two_parts(rank: int) -> list[dict[str, Any]]:
    return [_trained_in_two_parts(rank, budget) for budget in (None, "0.7x")]


def test_schedule_with_backward_in_two_parts_trains_within_its_budget_with_the_same_bits() -> None:
    for rank, (plain, ours) in enumerate(run_two(_two_parts)):
        assert ours["losses"] == plain["losses"]
        assert ours["gradients"] == plain["gradients"]
        assert ours["fits"]
        assert ours["again"] > 0
        assert ours["stages"] == [rank, rank + 2]


def _work(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {str(budget): _trained(rank, budget) for budget in (None, "0.7x", 1000)}


def test_pipeline_trains_within_its_budget_with_the_same_bits() -> None:
    found = run_two(_work)
    for rank, ways in enumerate(found):
        plain, ours = ways["None"], ways["0.7x"]
        assert ours["losses"] == plain["losses"]
        assert ours["gradients"] == plain["gradients"]
        assert ours["fits"]
        assert ours["again"] > 0
        assert ours["in_flight"] == {rank: 2 - rank}
    refused = [ways["1000"]["refused"] for ways in found]
    assert all("raise the budget" in sentence for sentence in refused)
