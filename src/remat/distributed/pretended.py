"""Plans for ranks that are not here: one process takes the place of rank 0, and the others are only pretended.

In: a model with its batch, an engine (DDP, ZeRO-1, FSDP2) and a number of ranks. Out: the plan of rank 0, made as on
real ones, and the traffic of a step. torch's fake process group answers every collective at once and moves nothing:
numbers are wrong, and every byte is where it would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.distributed.links import Traffic, parse_pipeline
from remat.distributed.pipelines.pretended import PretendedStage, plan_stages
from remat.errors import RematError
from remat.pytorch._compat.distributed import frees_after_forward, group_bytes, is_pretended, pretend_ranks
from remat.pytorch.run.optimize import optimize, plan_of

MOST_STEPS = 6
"""Until a step is planned: captured, watched and planned are three."""
BUCKET_BYTES = 25 << 20
"""DDP's own."""


@dataclass(frozen=True, slots=True)
class PretendedPlan:
    """What rank 0 of `ranks` would run and need."""

    plan: Plan
    engine: str
    ranks: int
    traffic: Traffic
    stages: tuple[PretendedStage, ...] = ()
    """Of a pipeline, each rank's, this one's included."""


@contextlib.contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """Meanwhile this process is rank 0 of so many."""
    if not distributed.is_available():
        raise RematError("This build of torch has no torch.distributed; install one that has it.")
    if distributed.is_initialized():
        raise RematError("This process is a rank of a real job already; plan for others in a process of its own.")
    pretend_ranks(ranks)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def plan_pretended(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    engine: str,
    ranks: int,
    budget: str | int | float | Budget,
    lr: float = 1e-3,
    **options: Any,
) -> PretendedPlan:
    """The plan of rank 0 of `ranks`, with the state of AdamW; see `remat.optimize` for `options`."""
    shape = parse_pipeline(engine)
    if shape is not None:
        if shape.stages != ranks:
            raise RematError(
                f"{engine} is {shape.stages} stages on as many ranks, and {ranks} were given; give as many."
            )
        options = {name: options[name] for name in ("solver", "time_limit", "seed") if name in options}
        found = plan_stages(model, args, kwargs, blocks_of(model), shape, budget=budget, lr=lr, **options)
        return PretendedPlan(found[0].plan, engine, ranks, found[0].traffic, tuple(found))
    with pretended(ranks):
        whole = parallel(model, engine)
        optimizer = optimizer_of(whole, engine, lr)
        planned = optimize(whole, budget, optimizer=optimizer, **options)
        return PretendedPlan(_planned(planned, args, kwargs), engine, ranks, traffic_of(whole, engine))


def _planned(step: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
    """Steps run until one is planned; what they compute is nobody's."""
    for _ in range(MOST_STEPS):
        outputs = step(*args, **kwargs)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        loss.sum().backward()
        step.zero_grad()
        with contextlib.suppress(RematError):
            return plan_of(step)
    return plan_of(step)


def parallel(model: nn.Module, engine: str, **options: Any) -> nn.Module:
    """The model as an engine trains it, on all ranks there are; `options` are for the engine."""
    if not engine.startswith("fsdp"):
        wrapped = DistributedDataParallel(model, **options)
        if is_pretended():
            wrapped.register_comm_hook(None, _reduced_at_once)
        return wrapped
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (distributed.get_world_size(),))
    frees = engine != "fsdp:keep"
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=frees, **options)
    sharded: nn.Module = fully_shard(model, mesh=mesh, reshard_after_forward=frees, **options)
    return sharded


def _reduced_at_once(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP asks the work of its all-reduce for the result, which that of a pretended rank does not have."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares them with its own types, and here they are texts.
_reduced_at_once.__annotations__.clear()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: members of a list, two or more of one class, that have parts of their own."""
    found: list[nn.Module] = []
    for module in model.modules():
        members = list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        kinds = {type(item) for item in members}
        is_block = len(members) > 1 and len(kinds) == 1 and not kinds & {nn.Sequential, nn.ModuleList}
        if is_block and next(members[0].children(), None) is not None:
            found.extend(members)
    return found


def optimizer_of(model: nn.Module, engine: str, lr: float) -> torch.optim.Optimizer:
    if engine != "zero1":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr)


def traffic_of(model: nn.Module, engine: str) -> Traffic:
    """What the engine sends in a step of a model that it has wrapped."""
    if engine.startswith("fsdp"):
        sizes = tuple(group_bytes(model))
        again = tuple(size for size, frees in zip(sizes, frees_after_forward(model), strict=True) if frees)
        return Traffic((*sizes, *again), sizes)
    total = sum(item.numel() * item.element_size() for item in model.parameters() if item.requires_grad)
    buckets = tuple(min(BUCKET_BYTES, total - done) for done in range(0, total, BUCKET_BYTES))
    return Traffic(gathered_bytes=(total,) if engine == "zero1" else (), reduced_bytes=buckets)
