"""What every level below the device promises: bits, shapes and strides come back, room is reused, limits are kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.late_engines import LateEngines

from remat.errors import BudgetError, OffloadFailed
from remat.pytorch.host import disk_store
from remat.pytorch.host import store as host_store
from remat.pytorch.host.disk_store import DiskStore
from remat.pytorch.host.levels import Level, parse_level
from remat.pytorch.host.space import ALIGNMENT
from remat.pytorch.host.store import HostStore

CPU = torch.device("cpu")
Open = Callable[..., HostStore | DiskStore]


@pytest.fixture(params=["cpu", "disk"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setattr(disk_store, "PIECE_BYTES", 2 * ALIGNMENT)
    folder = tmp_path if request.param == "disk" else None
    return lambda budget_bytes=None: Level(folder, budget_bytes).open(CPU)


BASE = torch.randn(6, 8, 10)
ODD_TENSORS = {
    "plain": BASE,
    "transposed": BASE.transpose(0, 2),
    "with gaps": BASE[:, ::2, 1:7],
    "expanded": BASE[0, 0, :1].expand(5, 7, 1),
    "channels last": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "truths": torch.randint(0, 2, (5, 3)).bool(),
    "bfloat16": torch.randn(7).to(torch.bfloat16),
    "conjugate": torch.randn(3, 3, dtype=torch.complex64).conj(),
    "parameter": torch.nn.Parameter(torch.randn(3, 2)),
    "many pieces": torch.randn(5, 7001),
}


@pytest.mark.parametrize("name", ODD_TENSORS)
def test_tensor_comes_back_with_bits_shape_and_strides(open_store: Open, name: str) -> None:
    store, tensor = open_store(), ODD_TENSORS[name]
    ticket = store.copy_out(tensor)
    ticket.wait_out()
    found = store.copy_back(ticket)
    ticket.wait_back()
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(found, tensor) and not found.requires_grad


def test_many_tensors_at_once_come_back_in_any_order_and_the_second_step_takes_nothing(open_store: Open) -> None:
    store, chance, taken = open_store(), random.Random(0), []
    for _ in range(2):
        tensors = [torch.randn(random.Random(place).randrange(1, 20_000)) for place in range(25)]
        pairs = [(store.copy_out(tensor), tensor) for tensor in tensors]
        for ticket, _ in pairs:
            ticket.wait_out()
        chance.shuffle(pairs)
        back = [store.copy_back(ticket) for ticket, _ in pairs]
        for (ticket, tensor), found in zip(pairs, back, strict=True):
            ticket.wait_back()
            assert torch.equal(found, tensor)
            store.release(ticket)
        assert store.used_bytes == 0
        taken.append(store.total_bytes)
    assert taken[0] == taken[1] > 0


@pytest.mark.parametrize("seed", range(15))
def test_late_copies_never_meet_memory_that_is_used_again(
    open_store: Open, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source is overwritten once it was waited for, as a caching allocator would hand its memory out again."""
    for module in (host_store, disk_store):
        monkeypatch.setattr(module, "engines_of", lambda _: LateEngines(seed))
    chance, store = random.Random(seed), open_store()
    out: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def leave(ticket: Any, source: torch.Tensor) -> None:
        ticket.wait_out()
        source.fill_(-1)

    for _ in range(80):
        if not out or chance.random() < 0.5:
            tensor = torch.full((chance.randrange(1, 6000),), chance.random())
            out.append((store.copy_out(tensor), tensor, tensor.clone()))
        ticket, source, expected = out.pop(chance.randrange(len(out)))
        found = store.copy_back(ticket) if chance.random() < 0.7 else None
        if chance.random() < 0.5:
            ticket.wait_back()
            assert found is None or torch.equal(found, expected)
            leave(ticket, source)
            if chance.random() < 0.3:
                source.copy_(expected).add_(1)
                expected = source.clone()
                store.copy_over(ticket, source)
            out.append((ticket, source, expected))
        else:
            ticket.wait_back() if chance.random() < 0.5 else None
            store.release(ticket)
            source.fill_(-1)
            assert found is None or torch.equal(found, expected)


def test_same_ticket_comes_back_twice(open_store: Open) -> None:
    store, tensor = open_store(), torch.randn(5000)
    ticket = store.copy_out(tensor)
    first, second = store.copy_back(ticket), store.copy_back(ticket)
    ticket.wait_back()
    assert torch.equal(first, tensor) and torch.equal(second, tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (4, 9001)])
def test_tensor_is_written_over_and_looked_at_where_it_lies(open_store: Open, shape: tuple[int, ...]) -> None:
    store, tensor = open_store(), torch.randn(shape)
    ticket = store.copy_out(torch.zeros(shape))
    taken = store.used_bytes
    store.copy_over(ticket, tensor)
    found = store.copy_back(ticket)
    ticket.wait_back()
    assert torch.equal(found, tensor) and torch.equal(store.peek(ticket), tensor)
    assert store.used_bytes == taken and store.peek(ticket).untyped_storage().nbytes() == tensor.nbytes


def test_budget_is_held_and_what_is_there_stays_readable(open_store: Open) -> None:
    store = open_store(3 * ALIGNMENT + 100)
    kept = store.copy_out(torch.arange(ALIGNMENT // 4))
    with pytest.raises(OffloadFailed, match="12.00 KiB more were to go to .*, and 8.00 KiB of its budget of 12.10 KiB"):
        store.copy_out(torch.zeros(3 * ALIGNMENT // 4))
    found = store.copy_back(kept)
    kept.wait_back()
    assert torch.equal(found, torch.arange(ALIGNMENT // 4))
    store.release(kept)
    store.release(kept)
    assert store.copy_out(torch.zeros(3 * ALIGNMENT // 4)) is not None


def test_no_budget_means_no_room(open_store: Open) -> None:
    with pytest.raises(OffloadFailed, match="raise the budget or offload less"):
        open_store(0).copy_out(torch.ones(1))


def test_dropped_ticket_releases_itself(open_store: Open) -> None:
    store = open_store()
    ticket = store.copy_out(torch.ones(10))
    assert store.used_bytes == ALIGNMENT
    del ticket
    assert store.used_bytes == 0


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("cpu", Level(None, None)),
        ("cpu:64GiB", Level(None, 64 * 2**30)),
        ("cpu:0", Level(None, 0)),
        ("disk:/a/b", Level(Path("/a/b"), None)),
        ("disk:/a:b", Level(Path("/a:b"), None)),
        ("disk:/a:b:2GB", Level(Path("/a:b"), 2 * 10**9)),
    ],
)
def test_level_is_read_as_it_is_written(text: str, level: Level) -> None:
    assert parse_level(text) == level


@pytest.mark.parametrize("text", ["", "gpu", "disk", "disk:", "cpu:half", "cpu:50%", "cpu:-1", None, 3])
def test_level_that_makes_no_sense_is_refused_in_a_sentence(text: object) -> None:
    with pytest.raises(BudgetError, match="Cannot (offload to|read)"):
        parse_level(text)  # type: ignore[arg-type]
