"""Stores and offloaded optimizers on a CUDA device: the same bits, no wait on the host, and memory that comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import remat
from remat.pytorch.host import memory
from remat.pytorch.host.levels import Level
from remat.pytorch.host.rates import copy_rates
from remat.pytorch.host.store import HostStore

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]
MIB = 2**20


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 32 * MIB)


@contextmanager
def no_waiting() -> Iterator[None]:
    """An error where the host waits for the device."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", ["cpu", "disk"])
def test_tensors_come_back_while_their_memory_is_used_again(level: str, tmp_path: Path) -> None:
    device, chance = torch.device("cuda"), random.Random(0)
    store = Level(tmp_path if level == "disk" else None, None).open(device)
    factor = torch.randn(1024, 1024, device=device)
    for _ in range(3):
        out: list[tuple[Any, float]] = []
        for number in range(30):
            # Work that keeps the device behind the host.
            torch.mm(factor, factor)
            tensor = torch.full((chance.randrange(1, 2 * MIB),), float(number), device=device)
            out.append((store.copy_out(tensor), float(number)))
            del tensor
            for ticket, _ in out[:-2]:
                ticket.wait_out()
        found = []
        for ticket, value in reversed(out):
            tensor = store.copy_back(ticket)
            torch.mm(factor, factor)
            ticket.wait_back()
            found.append((tensor == value).all())
            store.release(ticket)
        assert torch.stack(found).all() and store.used_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_host_memory_is_pinned_and_nobody_waits() -> None:
    store, tensor = HostStore(torch.device("cuda")), torch.randn(MIB, device="cuda")
    store.release(store.copy_out(tensor))
    with no_waiting():
        ticket = store.copy_out(tensor)
        ticket.wait_out()
        found = store.copy_back(ticket)
        ticket.wait_back()
    assert store.peek(ticket).is_pinned() and torch.equal(found, tensor)


def test_copies_run_beside_computations() -> None:
    """A copy that was begun first is over before computations that were begun after it."""
    store, tensor = HostStore(torch.device("cuda")), torch.randn(16 * MIB, device="cuda")
    store.release(store.copy_out(tensor))
    factor = torch.randn(8192, 8192, device="cuda")
    torch.mm(factor, factor)
    torch.cuda.synchronize()
    ticket = store.copy_out(tensor)
    for _ in range(20):
        torch.mm(factor, factor)
    over = torch.cuda.current_stream().record_event()
    store.peek(ticket)
    assert not over.query()


def layers(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = (part for _ in range(12) for part in (nn.Linear(512, 512), nn.GELU()))
    return nn.Sequential(*made).cuda().to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        x = torch.randn(64, 512, device="cuda", generator=generator).to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["cpu", "disk"])
def test_offloaded_updates_have_the_bits_of_plain_ones(kind: str, level: str, tmp_path: Path) -> None:
    plain, other = layers(torch.float32), layers(torch.float32)
    one = KINDS[kind](plain.parameters())
    where = "cpu" if level == "cpu" else f"disk:{tmp_path}"
    two = remat.offload_optimizer(KINDS[kind](other.parameters()), where, device_bytes=6 * MIB)
    train(plain, one, 20)
    train(other, two, 20)
    assert all(map(torch.equal, plain.parameters(), other.parameters()))
    saved = two.state_dict()["state"]
    for number, state in one.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value.cpu(), saved[number][key].cpu())


@pytest.mark.parametrize("in_backward", [False, True])
def test_master_weights_have_the_bits_of_resident_ones(in_backward: bool) -> None:
    from benchmarks.bench_optimizer_offload import ResidentMasters

    plain, other = layers(torch.bfloat16), layers(torch.bfloat16)
    optimizer = KINDS["fused"](other.parameters())
    remat.offload_optimizer(optimizer, master_weights=True, in_backward=in_backward, device_bytes=6 * MIB)
    train(plain, ResidentMasters(plain, 1e-3), 20)
    train(other, optimizer, 20)
    assert all(map(torch.equal, plain.parameters(), other.parameters()))


def test_step_does_not_wait_and_takes_little_of_the_device() -> None:
    model = nn.ParameterList(torch.ones(4 * MIB // 4, device="cuda") for _ in range(32))
    optimizer = remat.offload_optimizer(KINDS["fused"](model.parameters()), device_bytes=3 * 8 * MIB)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with no_waiting():
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 3 * 8 * MIB
    assert torch.cuda.memory_allocated() == before


def test_pinned_memory_that_is_refused_leaves_the_device_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 2**20)
    with pytest.raises(remat.OffloadFailed, match="The system refused"):
        slab = memory.Slab(2**20, torch.device("cuda"))
        # Memory that is pinned already cannot be pinned again.
        memory._pin(slab.tensor(0, torch.uint8, 2**20), torch.device("cuda"))
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_rates_are_those_of_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    found = copy_rates(Level(None, None), torch.device("cuda"))
    print(found)
    assert 1 < found.out_bytes_per_ns < 1000 and 1 < found.back_bytes_per_ns < 1000
    assert found.out_latency_ns < 1e7 and found.back_latency_ns < 1e7
