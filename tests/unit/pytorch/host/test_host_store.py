"""What goes to the host comes back with the same bits, in memory that is taken once and within its budget."""

from __future__ import annotations

import random

import pytest
import torch
from tests.support.late_engines import LateEngines

from remat.errors import OffloadFailed
from remat.pytorch.host.memory import HostMemory
from remat.pytorch.host.space import ALIGNMENT, Range, Space
from remat.pytorch.host.store import HostStore, HostTicket

CPU = torch.device("cpu")


def odd_tensors() -> list[torch.Tensor]:
    """Layouts that a plain copy would lose."""
    base = torch.randn(6, 8, 10)
    return [
        base,
        base.transpose(0, 2),
        base[:, ::2, 1:7],
        base[0, 0, :1].expand(5, 7, 1),
        torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.tensor(3.5),
        torch.randint(0, 2, (5, 3)).bool(),
        torch.randn(7).to(torch.bfloat16),
        torch.randn(3, 3, dtype=torch.complex64),
        torch.nn.Parameter(torch.randn(3, 2)),
    ]


@pytest.mark.parametrize("place", range(len(odd_tensors())))
def test_tensor_comes_back_with_bits_shape_and_strides(place: int) -> None:
    store, tensor = HostStore(CPU), odd_tensors()[place]
    ticket = store.copy_out(tensor)
    ticket.wait_out()
    found = store.copy_back(ticket)
    ticket.wait_back()
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(found, tensor) and not found.requires_grad


def test_second_step_takes_no_memory_from_the_system() -> None:
    store = HostStore(CPU)
    sizes = [random.Random(0).randrange(1, 90_000) for _ in range(40)]

    def step() -> None:
        tickets = [store.copy_out(torch.zeros(size)) for size in sizes]
        for ticket in reversed(tickets):
            store.copy_back(ticket)
            store.release(ticket)

    step()
    first = store.total_bytes
    step()
    assert store.total_bytes == first > 0 and store.used_bytes == 0


def test_budget_is_held_and_what_is_there_stays_readable() -> None:
    store = HostStore(CPU, budget_bytes=3 * ALIGNMENT)
    kept = store.copy_out(torch.arange(ALIGNMENT // 4))
    with pytest.raises(OffloadFailed, match="12.00 KiB more were to go to host memory, and 8.00 KiB of its budget"):
        store.copy_out(torch.zeros(3 * ALIGNMENT // 4))
    assert torch.equal(store.copy_back(kept), torch.arange(ALIGNMENT // 4))
    store.release(kept)
    assert store.copy_out(torch.zeros(3 * ALIGNMENT // 4)) is not None


def test_slabs_of_another_shape_make_room() -> None:
    memory = HostMemory(CPU, budget_bytes=4 * ALIGNMENT)
    first = memory.take(2 * ALIGNMENT)
    memory.give_back(first)
    memory.give_back(memory.take(4 * ALIGNMENT))
    assert memory.total_bytes == 4 * ALIGNMENT


def test_no_budget_means_no_room() -> None:
    with pytest.raises(OffloadFailed, match="raise the budget or offload less"):
        HostStore(CPU, budget_bytes=0).copy_out(torch.ones(1))


def test_dropped_ticket_releases_itself() -> None:
    store = HostStore(CPU)
    ticket = store.copy_out(torch.ones(10))
    assert store.used_bytes == ALIGNMENT
    del ticket
    assert store.used_bytes == 0


def test_memory_that_the_system_refuses_is_one_error() -> None:
    with pytest.raises(OffloadFailed, match="The system refused .* of host memory"):
        HostMemory(CPU).take(2**55)


@pytest.mark.parametrize("seed", range(30))
def test_late_copies_never_meet_memory_that_is_used_again(seed: int) -> None:
    """A source is overwritten once it was waited for, as a caching allocator would hand its memory out again."""
    chance, store = random.Random(seed), HostStore(CPU, engines=LateEngines(seed))
    out: list[tuple[HostTicket, torch.Tensor, torch.Tensor]] = []

    def leave(ticket: HostTicket, source: torch.Tensor) -> None:
        ticket.wait_out()
        source.fill_(-1)

    for _ in range(80):
        if not out or chance.random() < 0.5:
            tensor = torch.full((chance.randrange(1, 4000),), chance.random())
            out.append((store.copy_out(tensor), tensor, tensor.clone()))
        ticket, source, expected = out.pop(chance.randrange(len(out)))
        match chance.randrange(3):
            case 0:
                leave(ticket, source)
                out.append((ticket, source, expected))
            case 1:
                found = store.copy_back(ticket)
                ticket.wait_back()
                assert torch.equal(found, expected)
                leave(ticket, source)
                out.append((ticket, source, expected))
            case _:
                found = store.copy_back(ticket)
                store.release(ticket)
                source.fill_(-1)
                assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(20))
def test_ranges_never_overlap_and_grow_together_again(seed: int) -> None:
    chance, space, taken = random.Random(seed), Space(), list[Range]()
    extents = [space.add_extent(pages * ALIGNMENT) for pages in (30, 7)]
    for _ in range(200):
        if taken and chance.random() < 0.5:
            space.give_back(taken.pop(chance.randrange(len(taken))))
        elif (found := space.take(chance.randrange(1, 6 * ALIGNMENT))) is not None:
            taken.append(found)
        spans = sorted((item.extent, item.offset, item.offset + item.size_bytes) for item in taken)
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:], strict=False))
        assert space.free_bytes + sum(item.size_bytes for item in taken) == 37 * ALIGNMENT
    for item in taken:
        space.give_back(item)
    assert space.drop_free_extents() == extents and space.total_bytes == 0
