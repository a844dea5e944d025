"""torch.distributed.checkpoint: what ranks under a plan save is what they would without one, for as many or as few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as dcp
from tests.stacks.test_parallel import Net, batch
from tests.stacks.two_processes import run_two
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import remat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def built(share: str | None, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On two ranks sharded by FSDP2 around the plan, on one as it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    whole = model if share is None else remat.optimize(model, share, time_limit=1.0)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
    return whole, torch.optim.AdamW(whole.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for number in steps:
        loss = model(*batch(2 * number + rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "state": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "state": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and Adam's averages by name, gathered."""
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    averages = {f"{name} {kind}": item for name, of in state["state"].items() for kind, item in of.items()}
    return {name: item.clone() for name, item in {**weights, **averages}.items() if isinstance(item, torch.Tensor)}


def two_ranks(rank: int, folder: str, single: str) -> dict[str, Any]:
    """Saves in the middle of a training; another goes on from there, and one from what a single rank has saved."""
    model, optimizer = built("0.8x", 2)
    before = train(model, optimizer, rank, range(3))
    save(model, optimizer, folder)
    saved = whole_state(model, optimizer)
    after = train(model, optimizer, rank, range(3, 6))
    other, its_optimizer = built("0.8x", 2)
    load(other, its_optimizer, folder)
    resumed = train(other, its_optimizer, rank, range(3, 6))
    plain, its_optimizer = built(None, 2)
    plainly = train(plain, its_optimizer, rank, range(6))
    grown, its_optimizer = built("0.8x", 2)
    load(grown, its_optimizer, single)
    taken = whole_state(grown, its_optimizer)
    train(grown, its_optimizer, rank, range(2))
    return {
        "losses": before + after,
        "resumed": before + resumed,
        "plainly": plainly,
        "planned": remat.plan_of(other).predicted_peak < remat.plan_of(other).plain_peak_bytes,
        "saved": {name: item.tolist() for name, item in saved.items()} if rank == 0 else {},
        "taken": {name: item.tolist() for name, item in taken.items()} if rank == 0 else {},
    }


def test_training_goes_on_from_a_checkpoint_with_as_many_ranks_or_another_number(tmp_path: Path) -> None:
    alone, its_optimizer = built("0.8x", 1)
    train(alone, its_optimizer, 0, range(2))
    save(alone, its_optimizer, str(tmp_path / "one"))
    ranks = run_two(two_ranks, str(tmp_path / "two"), str(tmp_path / "one"))
    for rank in ranks:
        assert rank["planned"]
        assert rank["losses"] == rank["resumed"] == rank["plainly"]
    expected = whole_state(alone, its_optimizer)
    assert ranks[0]["taken"].keys() == expected.keys()
    assert all(torch.equal(torch.tensor(ranks[0]["taken"][name]), item) for name, item in expected.items())

    fewer, its_optimizer = built("0.8x", 1)
    load(fewer, its_optimizer, str(tmp_path / "two"))
    found = whole_state(fewer, its_optimizer)
    assert found.keys() == ranks[0]["saved"].keys()
    assert all(torch.equal(torch.tensor(ranks[0]["saved"][name]), item) for name, item in found.items())
    train(fewer, its_optimizer, 0, range(1))
