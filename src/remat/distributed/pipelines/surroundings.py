"""What a rank of a pipeline holds besides what its stages save: parameters, the batch, room to receive in, its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.core.simulate import simulate
from remat.core.solution import Status
from remat.distributed.pipelines.actions import Action
from remat.distributed.pipelines.choose import RankProblem, StageChoice
from remat.distributed.pipelines.rank_memory import RankHolds, RankMoment, StageHolds, StageNeeds, moments, peak_bytes
from remat.distributed.pipelines.stage_problem import StageProblem
from remat.pipeline import fingerprint
from remat.pytorch._compat import pipelining
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.costs.eager_step import EagerUnknown, eager_step
from remat.pytorch.device import storage_bytes, total_bytes
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.planning import surroundings_of
from remat.pytorch.run.variants import Variant


@dataclass(frozen=True, slots=True)
class StageSurroundings:
    modules: nn.ModuleList
    """Of all stages of the rank."""
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any
    """All that the step was called with."""
    target: Any
    """Of one micro-batch."""
    returns_outputs: bool


class _Loss(nn.Module):
    """A loss, followed as a model would be."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self._loss = loss

    def forward(self, output: Any, target: Any) -> Any:
        return self._loss(output, target)


def rank_problem(
    variants: Mapping[int, tuple[Any, Variant]],
    order: tuple[Action, ...],
    schedule: Any,
    around_it: StageSurroundings,
    budget: Budget,
) -> tuple[RankProblem, int]:
    """The problem of a rank, and the peak of its step without any plan."""
    device = next(iter(variants.values()))[1].captured.device
    owner = ResidentMemory(around_it.modules, around_it.optimizers)
    present = owner.residents(device).bytes_by_class
    received = sum(pipelining.received_bytes(stage) for stage, _ in variants.values())
    resident = sum(present.values()) + received + _batch_bytes(around_it.batch, device)
    stages = {
        number: StageProblem(variant.captured, variant.costs(), stage.is_last)
        for number, (stage, variant) in variants.items()
    }
    has_gradients = owner.has_gradients()
    held = {
        number: _held(stage, variant, schedule, around_it, has_gradients=has_gradients)
        for number, (stage, variant) in variants.items()
    }
    holds = RankHolds(held, resident, pipelining.holds_sends(schedule), around_it.returns_outputs)
    plain = {number: _plain_needs(stages[number], variant) for number, (_, variant) in variants.items()}
    plain_peak = peak_bytes(order, plain, holds)
    budget_bytes = budget.resolve(plain_peak_bytes=plain_peak, device_bytes=total_bytes(device))
    return RankProblem(stages, order, holds, budget_bytes), plain_peak


def _batch_bytes(batch: Any, device: torch.device) -> int:
    tensors = [item for item in tree_leaves(batch) if isinstance(item, torch.Tensor)]
    return sum({item.untyped_storage().data_ptr(): storage_bytes(item, device) for item in tensors}.values())


def _held(
    stage: Any, variant: Variant, schedule: Any, around_it: StageSurroundings, *, has_gradients: bool
) -> StageHolds:
    parameters = [item for item in stage.submod.parameters() if item.requires_grad]
    device = variant.captured.device
    sent = (item for item in pipelining.received(stage) if item.requires_grad or item.is_floating_point())
    saved, peak = _loss_bytes(variant, pipelining.loss_of(schedule), around_it) if stage.is_last else (0, 0)
    boundary = variant.captured.graph.ops[variant.captured.boundary]
    return StageHolds(
        gradient_bytes=sum(storage_bytes(item, device) for item in parameters),
        sent_back_bytes=sum(storage_bytes(item, device) for item in sent),
        output_bytes=sum(variant.captured.size_bytes[value] for value in boundary.inputs),
        is_last=stage.is_last,
        keeps_gradients=has_gradients,
        loss_saved_bytes=saved,
        loss_peak_bytes=peak,
    )


def _loss_bytes(variant: Variant, loss: Callable[..., Any] | None, around_it: StageSurroundings) -> tuple[int, int]:
    """What a loss leaves for its backward, and the most that it needs."""
    if loss is None or around_it.target is None:
        return 0, 0
    device = variant.captured.device
    outputs = [
        torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=device).requires_grad_()
        for item in _outputs(variant)
    ]
    given = outputs[0] if len(outputs) == 1 else tuple(outputs)
    try:
        followed = eager_step(_Loss(loss), (given, around_it.target), {}, device)
    except EagerUnknown:
        # As a loss that keeps a copy of what it was given and makes a gradient of it.
        size = sum(item.numel() * item.element_size() for item in outputs)
        return size, 2 * size
    return followed.held_bytes - followed.resident_bytes, followed.peak_bytes() - followed.resident_bytes


def _outputs(variant: Variant) -> Iterator[torch.Tensor]:
    for node in variant.captured.tangents():
        yield node.meta["val"]


def _plain_needs(stage: StageProblem, variant: Variant) -> StageNeeds:
    """Of plain eager."""
    peak = variant.plain_peak_bytes()
    needs = stage.needs(stage.plain())
    return StageNeeds(variant.held_bytes(), peak, peak - stage.received_bytes, needs.forward_ns, needs.backward_ns)


def stage_plan(
    problem: RankProblem, needs: Mapping[int, StageNeeds], number: int, choice: StageChoice, plain: tuple[int, Variant]
) -> Plan:
    """What was chosen for a stage, as a plan whose peak is that of its rank while the stage runs."""
    stage, (plain_peak, variant) = problem.stages[number], plain
    found = [item.peak_bytes for item in moments(problem.order, needs, problem.holds) if _runs(item, number)]
    alone = simulate(stage.problem(), choice.schedule)
    asked = stage.problem(problem.budget_bytes, max(0, max(found) - alone.peak_bytes))
    status = Status.OPTIMAL if alone.time_ns <= asked.base_time_ns else Status.FEASIBLE
    solution = replace(
        choice.solution,
        status=status,
        time_ns=alone.time_ns,
        peak_bytes=max(found),
        # Proven for what this stage may save, not for every share of the budget.
        bound_ns=asked.base_time_ns,
        min_budget_bytes=problem.budget_bytes,
    )
    named = surroundings_of([variant], {"of the rank": asked.resident_bytes}, plain_peak, 1)
    marks = fingerprint([stage.call()], named)
    return Plan(asked, solution, marks, plain_peak, breakdown_bytes=named.resident_bytes)


def _runs(moment: RankMoment, stage: int) -> bool:
    return moment.action is not None and moment.action.stage == stage
