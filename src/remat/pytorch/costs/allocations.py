"""Allocations as they happen, from the allocators themselves: nothing is missed, in forward, backward or a kernel.

On CPU the profiler reports every allocation and free with its address; on CUDA the caching allocator does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from remat.pytorch._compat.memory import (
    AllocationProfiler,
    cpu_allocation_events,
    cuda_allocation_events,
    op_range,
    record_cuda_allocations,
)
from remat.pytorch._compat.modes import without_modes
from remat.pytorch.cuda_peak import CudaPeak


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation (`size_bytes` > 0) or free (< 0)."""

    address: int
    size_bytes: int


@functools.cache
def take_matmul_workspaces(device: torch.device) -> None:
    """Let cuBLAS take now what it takes at the first product of a thread and keeps: in forward's, and in backward's."""
    if device.type == "cuda":
        with without_modes(), torch.enable_grad():
            factor = torch.ones(8, 8, device=device, requires_grad=True)
            torch.mm(factor, factor).sum().backward()


def watch(
    call: Callable[[], Any], device: torch.device, present: Iterable[torch.UntypedStorage] = ()
) -> tuple[Any, tuple[Allocation, ...]]:
    """Run `call` and return its result and what was allocated and freed on `device` meanwhile.

    On CPU, of what was there before, only frees of `present` are told, which is not kept alive.
    """
    if device.type == "cuda":
        return _watch_cuda(call, device)
    before: dict[int, int] = {}
    gone: list[int] = []
    references = [_note_end(storage, before, gone) for storage in present if storage.device.type == "cpu"]
    profiler = AllocationProfiler()
    with profiler:
        result = call()
    del references
    return result, tuple(_once(cpu_allocation_events(profiler, _END), before, gone))


_END = "remat: end of a storage"


def _note_end(storage: torch.UntypedStorage, before: dict[int, int], gone: list[int]) -> weakref.ref[Any]:
    """A profiler may not know of blocks that are older than itself; a mark among its events says when one goes."""
    address = int(storage.data_ptr())
    before[address] = int(storage.nbytes())

    def note(_: Any) -> None:
        with op_range(_END):
            gone.append(address)

    return weakref.ref(storage, note)


def _once(events: Iterable[tuple[int, int]], before: Mapping[int, int], gone: Iterable[int]) -> Iterator[Allocation]:
    """Each end once, and only of what was counted.

    The profiler also tells the end of a block that an earlier one saw begin, whether or not it has a mark.
    """
    alive, marked = dict(before), iter(gone)
    for event in events:
        address, size = event if event != (0, 0) else (next(marked), -1)
        if size > 0:
            alive[address] = size
            yield Allocation(address, size)
        elif address in alive:
            yield Allocation(address, -alive.pop(address))


def extra_bytes_of_calls(call: Callable[[], Any], device: torch.device) -> int:
    """The most that is allocated at once, beyond what was there before, while `call` runs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        return CudaPeak.of(call, device) - before
    _, events = watch(call, device)
    return peak_of(events)


def peak_of(events: tuple[Allocation, ...]) -> int:
    peak = current = 0
    for event in events:
        current += event.size_bytes
        peak = max(peak, current)
    return peak


def _watch_cuda(call: Callable[[], Any], device: torch.device) -> tuple[Any, tuple[Allocation, ...]]:
    torch.cuda.synchronize(device)
    with record_cuda_allocations():
        result = call()
        torch.cuda.synchronize(device)
        events = cuda_allocation_events(device)
    return result, tuple(Allocation(address, size) for address, size in events)
