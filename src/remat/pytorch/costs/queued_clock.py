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

REPEATS = 8


class QueuedClock:
    def __init__(self, device: torch.device) -> None:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(2 * cache_bytes, dtype=torch.uint8, device=device)
        self._shortest = 0
        """Of the head starts: what was too short for one call mostly is for the next."""
        self._own_ns = 0.0
        """What the clock itself takes: a call costs what one more of it would add."""
        self._own_ns = self._measure_itself()

    def _measure_itself(self) -> float:
        def some(count: int) -> float:
            def run() -> None:
                for _ in range(count):
                    self._other[:1].zero_()

            return min(self(run) for _ in range(REPEATS))

        some(1)
        one, many = some(1), some(1 + REPEATS)
        return max(0.0, one - (many - one) / REPEATS)

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
        return max(0.0, start.elapsed_time(end) * 1e6 - self._own_ns), is_late
