"""Plans for a pipeline whose ranks are not here: a model in, the plan of each of its stages out.

torch's own splitter cuts the model before some of its blocks; each stage is captured for a micro-batch, and planned for
as many as the schedule has in flight in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget
from remat.core.results.plan import Plan
from remat.distributed.links import PipelineShape, Traffic
from remat.distributed.pipelines.actions import in_flight, orders_of
from remat.distributed.pipelines.choose import choose, needs_of
from remat.distributed.pipelines.stage_session import captured_stage, stage_module
from remat.distributed.pipelines.surroundings import StageSurroundings, rank_problem, stage_plan
from remat.errors import CaptureError, RematError
from remat.pytorch._compat import pipelining
from remat.pytorch._compat.trees import tree_leaves, tree_map
from remat.pytorch.resident.memory import ResidentMemory


@dataclass(frozen=True, slots=True)
class PretendedStage:
    """What one rank of a pipeline would run and need."""

    plan: Plan
    in_flight: int
    traffic: Traffic


def plan_stages(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    blocks: Sequence[nn.Module],
    shape: PipelineShape,
    *,
    budget: str | int | float | Budget,
    lr: float = 1e-3,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
) -> list[PretendedStage]:
    """One plan for each stage, each on a rank of its own, under torch's 1F1B schedule and with the state of AdamW."""
    micro = tree_map(lambda item: _first_part(item, shape.micro_batches), (tuple(args), dict(kwargs)))
    schedule = pipelining.schedule_of_kind("1F1B", shape.stages, shape.micro_batches)
    orders = orders_of(pipelining.orders_of(schedule))
    found = []
    for number, (module, inputs) in enumerate(_stages(model, blocks, micro, shape.stages)):
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        _, session, runner = stage_module(module, ResidentMemory(module))
        variant = captured_stage(session, runner, inputs, {}, f"Stage {number}")
        stage = _stand_in(module, inputs, variant.captured.tangents(), number, shape)
        batch = (args, kwargs) if number in (0, shape.stages - 1) else ()
        around = StageSurroundings(nn.ModuleList([module]), [optimizer], batch, None, returns_outputs=True)
        problem, plain = rank_problem(
            {number: (stage, variant)}, orders[number], schedule, around, parse_budget(budget)
        )
        choices = choose(problem, solver=solver, time_limit_s=time_limit, seed=seed)
        plan = stage_plan(problem, needs_of(choices), number, choices[number], (plain, variant))
        found.append(PretendedStage(plan, in_flight(orders[number])[number], _traffic(stage, number, shape)))
    return found


def _first_part(item: Any, count: int) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    if item.dim() == 0 or len(item) % count:
        raise RematError(
            f"A batch of {len(item) if item.dim() else 1} cannot be split into {count} micro-batches; give a number "
            "that divides it, as pp:4:8."
        )
    return item[: len(item) // count]


def _stages(
    model: nn.Module, blocks: Sequence[nn.Module], micro: tuple[Any, Any], count: int
) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Modules and what each is called with."""
    if count > len(blocks):
        raise RematError(f"{count} stages need as many repeated blocks, and this model has {len(blocks)}; give fewer.")
    names = {id(module): name for name, module in model.named_modules()}
    begins = [names[id(blocks[round(len(blocks) * place / count)])] for place in range(1, count)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, modules = pipelining.split(model, micro[0], micro[1], begins)
    except Exception as error:  # torch.export raises many kinds
        reason = str(error).strip().split("\n")[0]
        raise CaptureError(
            f"torch.distributed.pipelining cannot split this model ({type(error).__name__}: {reason}); give stages of "
            "your own to remat.distributed.plan_pipeline."
        ) from error
    seen: dict[int, tuple[Any, ...]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, place=place: seen.update({place: inputs}))
        for place, module in enumerate(modules)
    ]
    with torch.no_grad():
        whole(*micro[0], **micro[1])
    for hook in hooks:
        hook.remove()
    return [(module, tuple(_as_received(item, place) for item in seen[place])) for place, module in enumerate(modules)]


def _as_received(item: Any, stage: int) -> Any:
    is_received = isinstance(item, torch.Tensor) and item.is_floating_point() and stage > 0
    return item.detach().requires_grad_() if is_received else item


def _stand_in(
    module: nn.Module, inputs: Sequence[Any], tangents: Sequence[Any], number: int, shape: PipelineShape
) -> Any:
    """What is asked of torch's stage, with room to receive in for each micro-batch."""
    is_last = number == shape.stages - 1
    received = [item for item in inputs if isinstance(item, torch.Tensor) and item.requires_grad]
    gradients = [] if is_last else [node.meta["val"] for node in tangents]

    def room(items: Sequence[torch.Tensor]) -> dict[int, tuple[Any, ...]]:
        made = ([torch.empty(item.shape, dtype=item.dtype, device=item.device) for item in items] for _ in every)
        return {
            micro: tuple(SimpleNamespace(buffer=item) for item in row) for micro, row in zip(every, made, strict=True)
        }

    every = range(shape.micro_batches)
    return SimpleNamespace(
        submod=module,
        is_first=number == 0,
        is_last=is_last,
        args_recv_info=room(received),
        grad_recv_info=room(gradients),
    )


def _traffic(stage: Any, number: int, shape: PipelineShape) -> Traffic:
    """Each received tensor was sent by another rank, and one like it goes the other way."""
    rooms = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
    sizes = [info.buffer.numel() * info.buffer.element_size() for row in rooms for info in row]
    return Traffic(sent_bytes=tuple(size for size in tree_leaves(sizes) for _ in range(2)))
