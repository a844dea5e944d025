"""A combination of levers, set up on this machine for a real model and optimizer.

In: a model, its optimizer and levers. Out: a `SetUp`, whose `train_step` does all of it: micro-batches, autocast,
GradScaler, accumulation. Each lever is pulled by who does it best: torch's autocast, DistributedDataParallel,
fully_shard and checkpoint, and Remat's own plans and offloading.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from remat.distributed.pretended import parallel
from remat.errors import RematError
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero
from remat.pytorch._compat.trees import tree_map
from remat.pytorch.explore.module_blocks import checkpoint_blocks
from remat.pytorch.host.optimizer import offload_optimizer
from remat.pytorch.run.optimize import optimize

AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class SetUp:
    """What trains as the levers say."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler | None
    levers: Levers
    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward and the loss."""
        dtype = AUTOCAST.get(self.levers.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One optimizer step on this rank's part of a batch; gives the mean loss."""
        total: Any = 0.0
        for number, (some, named) in enumerate(self.micro_batches(args, kwargs), start=1):
            with self._syncing(number == self.levers.accumulation):
                with self.autocast():
                    loss = self.model(*some, **named) / self.levers.accumulation
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
            del loss
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        return torch.as_tensor(total)

    def micro_batches(self, args: Any, kwargs: Any) -> Iterator[Any]:
        """The batch in `accumulation` parts along its first dimension."""
        for number in range(self.levers.accumulation):
            yield tree_map(lambda item, number=number: _part(item, number, self.levers), (args, kwargs))

    def _syncing(self, is_last: bool) -> AbstractContextManager[Any]:
        """Replicas add up their gradients once a step; shards after every micro-batch, or they would not be shards."""
        inner = getattr(self.model, "no_sync", None)
        return nullcontext() if is_last or inner is None or self.levers.zero.is_sharded else inner()


def set_up(model: nn.Module, optimizer: Optimizer, levers: Levers) -> SetUp:
    """`model` and `optimizer` as `levers` train them; both may be changed, and are to be replaced by the result's."""
    _check(levers.check())
    device = next(model.parameters()).device
    if levers.precision is Precision.PURE_BF16 and not (levers.has_masters and _is_sharded(levers)):
        model.to(torch.bfloat16)
    if levers.recomputation is Recomputation.PER_BLOCK:
        checkpoint_blocks(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = _parallel(model, levers)
    updating = _updating(trained, optimizer, levers, names)
    if levers.budget_bytes is not None:
        away = "cpu" if levers.offloads_activations else None
        trained = optimize(trained, levers.budget_bytes, optimizer=updating, offload=away)
    scaler = torch.amp.GradScaler(device.type) if levers.has_scaler else None
    return SetUp(trained, updating, scaler, levers, device)


def make_optimizer_of(kind: OptimizerKind, model: nn.Module, lr: float = _LEARNING_RATE) -> Optimizer:
    """The optimizer that the levers name, with fused kernels on a GPU."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not kind.is_adam:
        return torch.optim.SGD(trained, lr=lr, momentum=0.9 if kind is OptimizerKind.MOMENTUM else 0.0)
    is_cuda = any(parameter.device.type == "cuda" for parameter in trained)
    return torch.optim.AdamW(trained, lr=lr, fused=True if is_cuda else None)


def _check(levers: Levers) -> None:
    if levers.obstacle:
        raise RematError(levers.obstacle)
    here = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if here != levers.world:
        raise RematError(
            f"This combination is for {levers.world} ranks, and here are {here}; start it with "
            f"torchrun --nproc-per-node, and call torch.distributed.init_process_group first."
        )


def _is_sharded(levers: Levers) -> bool:
    return levers.zero.is_sharded and levers.replicas > 1


def _parallel(model: nn.Module, levers: Levers) -> nn.Module:
    if levers.replicas == 1:
        return model
    if not levers.zero.is_sharded:
        # Gradients lie in the buckets, once.
        return parallel(model, "ddp", gradient_as_bucket_view=True)
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    low, full = torch.bfloat16, torch.float32
    policy = MixedPrecisionPolicy(low, full) if levers.has_masters else MixedPrecisionPolicy()
    away = CPUOffloadPolicy() if levers.offloads_optimizer else OffloadPolicy()
    engine = "fsdp" if levers.zero is Zero.WEIGHTS else "fsdp:keep"
    return parallel(model, engine, mp_policy=policy, offload_policy=away)


def _updating(model: nn.Module, optimizer: Optimizer, levers: Levers, names: dict[Any, str]) -> Optimizer:
    """The optimizer for what the model's parameters have become."""
    if levers.replicas > 1 and levers.zero is Zero.OPTIMIZER:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **_options(optimizer.defaults))
    if _is_sharded(levers):
        now = dict(model.named_parameters())
        groups = [
            {**_options(group), "params": [now[names[item]] for item in group["params"]]}
            for group in optimizer.param_groups
        ]
        kind: Any = type(optimizer)
        rebuilt: Optimizer = kind(groups, **_options(optimizer.defaults))
        return rebuilt
    if levers.offloads_optimizer:
        return offload_optimizer(optimizer, master_weights=levers.has_masters, in_backward=levers.steps_in_backward)
    return optimizer


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """What can be given to the optimizer's class again; fused kernels are chosen anew for where parameters lie now."""
    dropped = ("params", "fused", "foreach", "decoupled_weight_decay")
    return {name: value for name, value in group.items() if name not in dropped}


def _part(item: Any, number: int, levers: Levers) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    is_low = levers.precision is Precision.PURE_BF16 and item.is_floating_point()
    item = item.to(torch.bfloat16) if is_low else item
    if item.dim() == 0 or levers.accumulation == 1:
        return item
    if item.shape[0] % levers.accumulation:
        raise RematError(
            f"A batch of {item.shape[0]} cannot be divided into {levers.accumulation} micro-batches; give this rank "
            f"{levers.micro_batch * levers.accumulation} samples."
        )
    size = item.shape[0] // levers.accumulation
    return item[number * size : (number + 1) * size]
