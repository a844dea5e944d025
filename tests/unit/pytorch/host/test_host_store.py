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


def test_slabs_of_another_shape_make_room() -> None:
    memory = HostMemory(CPU, budget_bytes=4 * ALIGNMENT)
    first = memory.take(2 * ALIGNMENT)
    memory.give_back(first)
    memory.give_back(memory.take(4 * ALIGNMENT))
    assert memory.total_bytes == 4 * ALIGNMENT


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
