"""Host memory within a budget, in slabs that stay from step to step.

In: requests for bytes. Out: ranges, and tensors that lie on them. Slabs come from the system and not from torch, so
that what is on the host is not taken for memory of a CPU step; beside a CUDA device they are pinned, without which a
copy would wait. A request beyond the budget, or that the system refuses, is `OffloadFailed`.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from remat.core.budget import format_bytes
from remat.errors import OffloadFailed
from remat.pytorch.host.space import Range, Space, aligned

SLAB_BYTES, LARGEST_SLAB_BYTES = 64 * 2**20, 512 * 2**20
"""Of the first slab, and of one of many: each is as large as those before it together."""
_PORTABLE = 1
"""Pinned for every device of the process."""


class HostMemory:
    """Slabs for copies of one device's tensors."""

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self._device, self._budget_bytes = device, budget_bytes
        self._space = Space()
        self._slabs: dict[int, Slab] = {}

    @property
    def total_bytes(self) -> int:
        """What was taken from the system."""
        return self._space.total_bytes

    @property
    def used_bytes(self) -> int:
        return self._space.total_bytes - self._space.free_bytes

    def take(self, size_bytes: int) -> Range:
        found = self._space.take(size_bytes)
        if found is None:
            self._grow(aligned(size_bytes))
            found = self._space.take(size_bytes)
        assert found is not None, "a new slab has room for what it was made for"
        return found

    def give_back(self, taken: Range) -> None:
        self._space.give_back(taken)

    def tensor(self, place: Range, dtype: torch.dtype, count: int) -> torch.Tensor:
        """So many elements at the beginning of a range."""
        return self._slabs[place.extent].tensor(place.offset, dtype, count)

    def _grow(self, wanted: int) -> None:
        if self._room() < wanted:
            # Slabs of a shape that is gone: let one come in their place.
            for number in self._space.drop_free_extents():
                self._slabs.pop(number).close()
        room = self._room()
        if room < wanted:
            raise OffloadFailed(
                f"{format_bytes(wanted)} more were to go to host memory, and {format_bytes(self.used_bytes)} of its "
                f"budget of {format_bytes(self._budget_bytes or 0)} are in use; raise the budget or offload less."
            )
        usual = min(max(SLAB_BYTES, self.total_bytes), LARGEST_SLAB_BYTES, room)
        try:
            slab = Slab(max(wanted, usual), self._device)
        except OffloadFailed:
            if wanted >= usual:
                raise
            slab = Slab(wanted, self._device)
        self._slabs[self._space.add_extent(slab.size_bytes)] = slab

    def _room(self) -> int:
        if self._budget_bytes is None:
            return 2**62
        whole_pages = self._budget_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        return whole_pages - self._space.total_bytes


class Slab:
    """One piece of host memory, pinned where a CUDA device copies from it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        if (free := available_bytes()) < size_bytes:
            # The system would promise it, and end the process when it is used.
            raise OffloadFailed(_refused(size_bytes, f"{format_bytes(free)} are free"))
        try:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise OffloadFailed(_refused(size_bytes, str(error))) from error
        # Large pages are pinned faster; a system without them says so with an error.
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        self._close: weakref.finalize[Any, Any] | None = None
        if device.type == "cuda":
            # A child of a fork would share pages that the device writes.
            memory.madvise(mmap.MADV_DONTFORK)
            whole = self.tensor(0, torch.uint8, size_bytes)
            _pin(whole, device)
            self._close = weakref.finalize(self, _unpin, whole, device, os.getpid())
            # At the end of the process all is unpinned anyway.
            self._close.atexit = False

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """One with a storage of its own: whoever saves it does not save the slab."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Unpin; the memory goes with the last tensor on it."""
        if self._close is not None:
            self._close()


def _pin(memory: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        # Pages are made by the host's threads: pinning would make them one by one.
        memory.zero_()
        failure = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE))
        if failure:
            # CUDA keeps the error for whoever launches the next kernel.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise OffloadFailed(_refused(memory.nbytes, f"CUDA error {failure}"))


def _refused(size_bytes: int, reason: str) -> str:
    return (
        f"The system refused {format_bytes(size_bytes)} of host memory for what was to be offloaded ({reason}); lower "
        "the host budget, or raise the limit of locked memory (ulimit -l)."
    )


def _unpin(memory: torch.Tensor, device: torch.device, process: int) -> None:
    if os.getpid() != process:
        # A child of a fork, whose parent pinned it.
        return
    with torch.cuda.device(device):
        # Copies may still be under way.
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def available_bytes() -> int:
    """What the system, and the group of processes that this one is in, can still give; much where neither tells."""
    found = [2**62]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Pages of files that nobody has used for long are given back when others are asked for.
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        # Without a limit this is no number.
        found.append(int((group / "memory.max").read_text()) - used)
    return max(0, min(found))
