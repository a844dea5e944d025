"""What goes to the host comes back with the same bits, in memory that is taken once and within its budget."""

from __future__ import annotations

import random

import pytest
import torch

from remat.errors import OffloadFailed
from remat.pytorch.host import memory
from remat.pytorch.host.memory import HostMemory
from remat.pytorch.host.space import ALIGNMENT, Range, Space

CPU = torch.device("cpu")


def test_slabs_of_another_shape_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = HostMemory(CPU, budget_bytes=4 * ALIGNMENT)
    monkeypatch.setattr(memory, "SLAB_BYTES", ALIGNMENT)
    slabs.give_back(slabs.take(2 * ALIGNMENT))
    assert slabs.total_bytes == 2 * ALIGNMENT
    slabs.give_back(slabs.take(4 * ALIGNMENT))
    assert slabs.total_bytes == 4 * ALIGNMENT


def test_memory_that_is_not_free_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < memory.available_bytes() < 2**62
    monkeypatch.setattr(memory, "available_bytes", lambda: 5000)
    slabs = HostMemory(CPU, 8192)
    # A whole slab is not free, and what is asked for is.
    assert slabs.take(4096).size_bytes == slabs.total_bytes == 4096
    monkeypatch.setattr(memory, "available_bytes", lambda: 3000)
    with pytest.raises(OffloadFailed, match=r"The system refused 4.00 KiB of host memory .* \(2.93 KiB are free\)"):
        slabs.take(4096)


def test_memory_that_the_system_refuses_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**62)
    with pytest.raises(OffloadFailed, match=r"The system refused .* of host memory .* \(.*Cannot allocate memory"):
        HostMemory(CPU).take(2**55)


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
