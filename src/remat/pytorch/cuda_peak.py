"""The caching allocator's peak, shared: it has one, and several may want to know theirs at once.

Everyone who takes the peak starts the allocator's own anew; what it was until then is kept for all the others.
"""

from __future__ import annotations

import torch


class CudaPeak:
    """The most that was allocated since this was opened or last taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = 0

    def open(self) -> None:
        _renew(self._device)
        self._bytes = 0
        _open.append(self)

    def take(self) -> int:
        _renew(self._device)
        found, self._bytes = self._bytes, 0
        return found

    def close(self) -> None:
        _open.remove(self)


_open: list[CudaPeak] = []


def _renew(device: torch.device) -> None:
    # The flat `max_memory_allocated` sorts a hundred counters first.
    peak = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"]
    for item in _open:
        item._bytes = max(item._bytes, peak)
    torch.cuda.reset_peak_memory_stats(device)
