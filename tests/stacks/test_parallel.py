"""Two processes: DistributedDataParallel around a planned model and inside of one, and sharded parameters measured."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from tests.stacks.two_processes import run_two
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import remat

pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), y)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(256, 64, generator=generator), torch.randint(10, (256,), generator=generator)


def wrapped(how: str, share: str) -> nn.Module:
    # Small buckets, so that Dynamo would cut the graph into several.
    model, options = Net(), {"bucket_cap_mb": 0.1}
    if how == "inside":
        return DistributedDataParallel(remat.optimize(model, share), **options)
    parallel = DistributedDataParallel(model, **options)
    return parallel if how == "plain" else remat.optimize(parallel, share)


def train(rank: int, how: str, share: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrapped(how, share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(4):
        loss = model(*batch(2 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    data = batch(100 + rank)
    peak = remat.measure(lambda: model(*data).backward()).peak_bytes
    plan = None if how == "plain" else remat.plan_of(model if how == "outside" else model.module)
    names = sorted(model.state_dict())
    return {"losses": losses, "peak": peak, "budget": plan and plan.budget_bytes, "names": names}


def test_planned_model_trains_inside_and_around_distributed_data_parallel(budget: str) -> None:
    plain, inside, outside = (run_two(train, how, budget) for how in ("plain", "inside", "outside"))
    for rank in range(2):
        assert plain[rank]["losses"] == inside[rank]["losses"] == outside[rank]["losses"]
        assert plain[rank]["names"] == inside[rank]["names"] == outside[rank]["names"]
        for planned in (inside, outside):
            assert planned[rank]["peak"] <= planned[rank]["budget"]
            assert planned[rank]["peak"] < 0.9 * plain[rank]["peak"]
    assert plain[0]["losses"] != plain[1]["losses"]


def measure_sharded(rank: int) -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    data = batch(rank)
    found = remat.measure(lambda: model(*data).backward())
    return found.breakdown["parameters"], whole


def test_sharded_parameters_are_measured_by_what_this_process_holds() -> None:
    for held, whole in run_two(measure_sharded):
        assert 0.45 * whole < held <= 0.55 * whole
