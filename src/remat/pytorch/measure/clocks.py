"""Where the times of a followed step come from: the wall on a CPU, events on CUDA, or anything with these methods.

A clock is told before and after every op and gives all times at the end, so that nothing waits for the device while
the step runs.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def begin(self) -> None:
        """An op begins."""

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """It is over; `result` is None where it raised."""

    def times_ns(self) -> list[float]:
        """One time for each op so far."""


class WallClock:
    """For devices whose ops are over when they return."""

    def __init__(self) -> None:
        self._start = 0
        self._times: list[float] = []

    def begin(self) -> None:
        self._start = time.perf_counter_ns()

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._times.append(float(time.perf_counter_ns() - self._start))

    def times_ns(self) -> list[float]:
        return list(self._times)


class CudaClock:
    """A pair of events for each op, read when the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.Event(enable_timing=True)
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        stop = torch.cuda.Event(enable_timing=True)
        stop.record()
        self._pairs.append((self._start, stop))

    def times_ns(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(stop) * 1e6 for start, stop in self._pairs]


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else WallClock()
