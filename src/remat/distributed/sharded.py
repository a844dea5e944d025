"""Parameters as shards whose gathers are ops of the graph: what SimpleFSDP does, for Remat to plan.

In: a model that is the same on every rank. Out: the same model, of whose parameters each rank holds its part; wherever
one is read it is gathered, and its gradient is averaged and scattered. All of that is captured with the rest of the
step, so that a plan decides for each parameter whether it is kept from forward to backward or gathered again, by what
the link takes and what the bytes are worth: ZeRO-2 or ZeRO-3, parameter by parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.utils import parametrize

from remat.errors import RematError
from remat.pytorch._compat.distributed import gather_with_gradient
from remat.pytorch.costs.collective_costs import RankLink, state_link
from remat.pytorch.graph.nodes import PLANNED_TOGETHER

MEASURED_BYTES = (1 << 12, 1 << 24)
"""Gathers that tell latency and bandwidth."""
MEASURED_TIMES = 5


class GatheredParameter(nn.Module):
    """The whole of a parameter, from the parts that ranks hold."""

    def __init__(self, shape: torch.Size, group: Any, element_bytes: int) -> None:
        super().__init__()
        self._shape, self.gathers_over, self.whole_bytes = shape, group, shape.numel() * element_bytes

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        whole = gather_with_gradient(shard, self.gathers_over)
        return whole[: self._shape.numel()].view(self._shape)


def shard(model: nn.Module, group: Any = None) -> nn.Module:
    """Spread the parameters of `model` over the ranks of a group, in place; every rank calls this.

    An optimizer is made afterwards, of the shards. Gradients are averages over ranks, as DDP's and FSDP's are.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        raise RematError("Parameters are spread over ranks, and there are none; call init_process_group first.")
    group = distributed.group.WORLD if group is None else group
    PLANNED_TOGETHER.add(group.group_name)
    shards: dict[int, nn.Parameter] = {}
    owners = [(module, name) for module in list(model.modules()) for name in list(module._parameters)]
    for module, name in owners:
        whole = module._parameters[name]
        if whole is None:
            continue
        shape = whole.shape
        if id(whole) not in shards:
            # As long as the model lives nobody else gets this number.
            shards[id(whole)] = _own_part(whole, group)
        setattr(module, name, shards[id(whole)])
        gathered = GatheredParameter(shape, group, whole.element_size())
        parametrize.register_parametrization(module, name, gathered, unsafe=True)
    return model


def _own_part(whole: nn.Parameter, group: Any) -> nn.Parameter:
    """This rank's rows of the flat parameter, padded so that every rank has as many."""
    ranks, own = distributed.get_world_size(group), distributed.get_rank(group)
    length = -(-whole.numel() // ranks)
    flat = whole.detach().reshape(-1)[own * length : (own + 1) * length]
    part = torch.zeros(length, dtype=whole.dtype, device=whole.device)
    part[: len(flat)] = flat
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def assume_link(*, gb_per_s: float, latency_us: float) -> RankLink:
    """Price collectives inside graphs by a link of one direction between one rank and the next."""
    if gb_per_s <= 0 or latency_us < 0:
        raise RematError(
            f"No link has {gb_per_s:g} GB/s and {latency_us:g} µs; give a bandwidth above 0, a latency from 0."
        )
    link = RankLink(gb_per_s * 1e9, latency_us * 1e-6)
    state_link(link)
    return link


def measure_link(group: Any = None) -> RankLink:
    """Time gathers of a group and price collectives by them; every rank of the group calls this."""
    import time

    group = distributed.group.WORLD if group is None else group
    ranks = distributed.get_world_size(group)
    if ranks < 2:
        raise RematError("A link has two ends, and this group has one rank; state it with assume_link.")
    taken = []
    for size in MEASURED_BYTES:
        part = torch.zeros(size // 4 // ranks)
        whole = torch.empty(size // 4 // ranks * ranks)
        times = []
        for _ in range(MEASURED_TIMES):
            distributed.barrier(group)
            began = time.perf_counter()
            distributed.all_gather_into_tensor(whole, part, group=group)
            times.append(time.perf_counter() - began)
        # The slowest rank is waited for by all, and all must price alike.
        slowest = torch.tensor([sorted(times)[MEASURED_TIMES // 2]])
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group=group)
        taken.append(slowest.item())
    small, large = taken
    per_byte = max(1e-12, (large - small) / (MEASURED_BYTES[1] - MEASURED_BYTES[0]))
    link = RankLink((ranks - 1) / ranks / per_byte, small / (ranks - 1))
    state_link(link)
    return link
