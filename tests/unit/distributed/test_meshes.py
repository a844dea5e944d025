"""Ranks in meshes, with one process in the place of rank 0 of four: what it holds is planned for by its own size."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import distributed, nn

import remat
from remat.distributed.pretended import pretended

if not distributed.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Widened() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sharded_in_replicas(model: Stack) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Stack) -> nn.Module:
    mesh = init_device_mesh("cpu", (4,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    return model


def trained(model: nn.Module) -> tuple[Any, int]:
    """The plan in use after some steps, and the peak of one more."""
    planned = remat.optimize(model, "0.8x", time_limit=1.0)
    data = torch.randn(512, 32)

    def step() -> None:
        planned(data).backward()
        planned.zero_grad()

    for _ in range(4):
        step()
    return remat.plan_of(planned), remat.measure(step).peak_bytes


# Dynamo meets warnings of torch's own while it looks into FSDP2, and gives up where they are errors.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("spread", "parts"), [(sharded_in_replicas, 2), (tensor_parallel, 4)], ids=["hsdp", "tp"])
def test_rank_of_a_mesh_is_planned_by_what_it_holds(spread: Any, parts: int) -> None:
    with pretended(4):
        torch.manual_seed(0)
        model = Stack()
        whole = sum(4 * item.numel() for item in model.parameters())
        plan, peak = trained(spread(model))
    held = dict(plan.breakdown_bytes)["parameters"]
    assert whole / parts <= held < 1.1 * whole / parts
    assert peak <= plan.budget_bytes
    assert abs(plan.predicted_peak - peak) < 0.02 * peak
    assert peak < 0.9 * plan.plain_peak_bytes
