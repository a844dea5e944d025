"""Values that spend a while in host memory, on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import zoo
from remat.core.copies import Link, copies_of
from remat.pytorch.host import shared
from remat.pytorch.host.shared import shared_store

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]


@pytest.fixture(autouse=True)
def copies_look_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that plans have some, whatever else the device is doing."""
    monkeypatch.setattr(shared, "link_to", lambda where, device: Link(500.0, 500.0))


@pytest.fixture(scope="module")
def gpt() -> zoo.Example:
    return zoo.build("gpt", scale="demo", device="cuda", batch=16)


def gradients(model: nn.Module, example: zoo.Example) -> list[torch.Tensor]:
    torch.manual_seed(1)
    example.model.zero_grad()
    model(*example.args, **example.kwargs).backward()
    return [item.grad.cpu() for item in example.model.parameters() if item.grad is not None]


def planned(example: zoo.Example, budget: str, **options: Any) -> nn.Module:
    model: nn.Module = remat.optimize(example.model, budget, time_limit=3, **options)
    gradients(model, example)
    return model


def test_gradients_are_the_same_and_the_budget_holds_with_values_on_the_host(gpt: zoo.Example) -> None:
    expected = gradients(gpt.model, gpt)
    model = planned(gpt, "0.45x", offload="cpu")
    plan = remat.plan_of(model)
    assert copies_of(plan.problem.graph), "something is offloaded"
    for _ in range(3):
        gpt.model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        assert all(map(torch.equal, expected, gradients(model, gpt)))
        assert torch.cuda.max_memory_allocated() <= plan.budget_bytes
    assert shared_store("cpu", torch.device("cuda", 0)).used_bytes == 0


def test_nothing_makes_the_host_wait(gpt: zoo.Example) -> None:
    model = planned(gpt, "0.45x", offload="cpu")
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        loss = model(*gpt.args, **gpt.kwargs)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_step_is_the_same_while_copies_are_slow(gpt: zoo.Example) -> None:
    """A link that is slower than thought makes a step slower, and no larger: a busy engine delays every copy."""
    expected = gradients(gpt.model, gpt)
    model = planned(gpt, "0.45x", offload="cpu")
    engines: Any = shared_store("cpu", torch.device("cuda", 0)).inner
    for stream in (engines._engines._out, engines._engines._back):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
    assert all(map(torch.equal, expected, gradients(model, gpt)))


def test_disk_gives_back_the_same_bits(gpt: zoo.Example, tmp_path: Path) -> None:
    expected = gradients(gpt.model, gpt)
    model = planned(gpt, "0.45x", offload=f"disk:{tmp_path}")
    assert all(map(torch.equal, expected, gradients(model, gpt)))
    assert not list(tmp_path.iterdir()), "the file has no name"
