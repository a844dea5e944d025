"""The caching allocator's peak, shared: it has one, and several may want to know theirs at once.

Everyone who takes the peak starts the allocator's own anew; what it was until then is kept for all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CudaPeak:
    """The most that was allocated since this was opened or last taken."""

    @classmethod
    def of(cls, call: Callable[[], Any], device: torch.device) -> int:
        """The most that is allocated while `call` runs, with what was there before."""
        peak = cls(device)
        peak.open()
        try:
            call()
            return peak.look()
        finally:
            peak.close()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0

    def open(self, *, may_have_been: int = -1) -> None:
        """The allocator's own peak, which is the caller's too, is left alone where it is no higher than that."""
        if _allocators(self._device) > may_have_been:
            _renew(self._device)
        self._bytes = 0
        _open.append(self)

    def look(self) -> int:
        """The peak so far, which goes on; no less than what it may have been before."""
        return max(self._bytes, _allocators(self._device))

    def take(self) -> int:
        _renew(self._device)
        found, self._bytes = self._bytes, 0
        return found

    def close(self) -> None:
        _open.remove(self)


_open: list[CudaPeak] = []


def _renew(device: torch.device) -> None:
    peak = _allocators(device)
    for item in _open:
        item._bytes = max(item._bytes, peak)
    torch.cuda.reset_peak_memory_stats(device)


def _allocators(device: torch.device) -> int:
    # The flat `max_memory_allocated` sorts a hundred counters first.
    found = torch.cuda.memory_stats_as_nested_dict(device)
    return int(found["allocated_bytes"]["all"]["peak"]) if found else 0
