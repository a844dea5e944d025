"""How long one call takes on a CUDA device, whatever the host is doing.

In: a call. Out: nanoseconds. The device is kept busy until all of the call's kernels wait for it: launched one by one
by a host that is late, as beside other processes, they would be timed with the gaps between them. Inputs are not in
the device's cache: in a step, an activation has left it long ago.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.pytorch._compat.cuda_queue import keep_busy

HEAD_STARTS = (200_000, 800_000, 3_200_000)
"""Cycles for which the device is kept busy, about 0.1 to 2 ms: the first that is enough for the host is used. None is
for a call that waits for the device itself; that is timed as it is."""


class QueuedClock:
    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)
        self._shortest = 0
        """Of the head starts: what was too short for one call mostly is for the next."""

    def __call__(self, call: Callable[[], Any]) -> float:
        for place, cycles in enumerate(HEAD_STARTS[self._shortest :], self._shortest):
            taken_ns, is_late = self._time(call, cycles)
            if not is_late:
                self._shortest = place
                break
        return taken_ns

    def _time(self, call: Callable[[], Any], cycles: int) -> tuple[float, bool]:
        """The time, and whether the device waited for the host."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        keep_busy(cycles)
        self._other.zero_()
        start.record()
        call()
        end.record()
        is_late = start.query()
        end.synchronize()
        return start.elapsed_time(end) * 1e6, is_late
