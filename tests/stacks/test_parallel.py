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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4096, 64, generator=generator), torch.randint(10, (4096,), generator=generator)


REPLICATED = {"ddp": ("inside", "outside"), "zero1": ("inside",)}
SHARDED = {"fsdp keep": ("inside",), "fsdp free": ("outside",)}
LIMIT_S = 2.0


def wrapped(engine: str, order: str, share: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    within = remat.optimize(model, share, time_limit=LIMIT_S) if order == "inside" else model
    if engine in ("ddp", "zero1"):
        # Small buckets, so that Dynamo would cut the graph into several.
        whole: nn.Module = DistributedDataParallel(within, bucket_cap_mb=0.1)
    else:
        how = {"mesh": init_device_mesh("cpu", (2,)), "reshard_after_forward": engine == "fsdp free"}
        for layer in model.layers:
            fully_shard(layer, **how)
        whole = fully_shard(within, **how)
    return remat.optimize(whole, share, time_limit=LIMIT_S) if order == "outside" else whole


def optimizer_of(engine: str, model: nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if engine == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(rank: int, engine: str, order: str, share: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = wrapped(engine, order, share)
    optimizer = optimizer_of(engine, model)
    losses = []
    for number in range(4):
        loss = model(*batch(2 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    data, kept = batch(100 + rank), [optimizer]

    def step() -> None:
        model(*data).backward()
        kept[0].zero_grad()

    peak = remat.measure(step).peak_bytes
    names = sorted(model.state_dict())
    found = {"losses": losses, "peak": peak, "names": names}
    if order != "plain":
        plan = remat.plan_of(model)
        found |= {"budget": plan.budget_bytes, "predicted": plan.predicted_peak, "schedule": plan.schedule}
    return found


def train_every_way(rank: int, engines: dict[str, tuple[str, ...]], share: str) -> dict[str, dict[str, Any]]:
    ways = ((engine, order) for engine, orders in engines.items() for order in ("plain", *orders))
    return {f"{engine} {order}": train(rank, engine, order, share) for engine, order in ways}


@pytest.mark.parametrize("engines", [REPLICATED, SHARDED], ids=["replicated", "sharded"])
def test_planned_model_trains_inside_and_around_what_shares_it(engines: dict[str, tuple[str, ...]]) -> None:
    ranks = run_two(train_every_way, engines, "0.8x")
    for engine, order in ((engine, order) for engine, orders in engines.items() for order in orders):
        plain, planned = ([rank[f"{engine} {way}"] for rank in ranks] for way in ("plain", order))
        assert planned[0]["schedule"] == planned[1]["schedule"], "one plan"
        assert plain[0]["losses"] != plain[1]["losses"]
        for rank in range(2):
            assert planned[rank]["losses"] == plain[rank]["losses"]
            assert planned[rank]["names"] == plain[rank]["names"]
            assert planned[rank]["peak"] <= planned[rank]["budget"]
            assert planned[rank]["peak"] < 0.9 * plain[rank]["peak"]
            assert abs(planned[rank]["predicted"] - planned[rank]["peak"]) < 0.02 * planned[rank]["peak"]


def told(rank: int, budgets: tuple[str, str]) -> list[str]:
    """What a rank is told at its first step, by its class."""
    torch.manual_seed(0)
    model = DistributedDataParallel(remat.optimize(Net(), budgets[rank]))
    try:
        model(*batch(rank)).backward()
    except remat.RematError as error:
        return [type(error).__name__, str(error)]
    return []


def refused_every_way(rank: int) -> list[list[str]]:
    return [told(rank, budgets) for budgets in (("100KB", "100KB"), ("0.8x", "0.9x"))]


def test_what_is_refused_is_refused_on_every_rank_with_the_same_sentence() -> None:
    first, second = run_two(refused_every_way)
    assert first == second
    assert [kind for kind, _ in first] == ["InfeasibleBudget", "RanksDiffer"]
    assert first[1][1].startswith("Rank 1 differs from rank 0 in budget: 0.9")


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


def train_tensor_parallel(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, found = init_device_mesh("cpu", (2,)), {}
    for way in ("plain", "planned"):
        torch.manual_seed(0)
        model = Net()
        for layer in model.layers:
            parallelize_module(layer, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
        step = model if way == "plain" else remat.optimize(model, "0.8x", time_limit=LIMIT_S)
        optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3)
        found[way] = []
        for number in range(3):
            loss = step(*batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[way].append(loss.item())
    plan, data = remat.plan_of(step), batch(100)
    peak = remat.measure(lambda: step(*data).backward()).peak_bytes
    return {**found, "peak": peak, "budget": plan.budget_bytes, "schedule": plan.schedule}


def test_tensor_parallel_model_is_planned_within_its_part_of_the_memory() -> None:
    ranks = run_two(train_tensor_parallel)
    assert ranks[0]["schedule"] == ranks[1]["schedule"]
    for rank in ranks:
        assert rank["plain"] == rank["planned"]
        assert rank["peak"] <= rank["budget"]
