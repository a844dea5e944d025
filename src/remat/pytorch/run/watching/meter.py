"""What is allocated on a device between two marks of a step, told by its allocator or the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from remat.pytorch._compat.engine import in_backward, unwatch_engine, watch_engine
from remat.pytorch._compat.memory import AllocationProfiler, cpu_allocation_events, op_range, profiler_is_running
from remat.pytorch.cuda_peak import CudaPeak


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes allocated between two marks, counted from an origin of the meter's own."""

    peak_bytes: int
    end_bytes: int


class Meter:
    """Follows what is allocated on a device, from mark to mark.

    On CPU the profiler tells. It belongs to the user's thread as it is outside of backward: what is ended inside, the
    engine brings back. So in backward only marks are set, a stop waits, and `on_engine_return` is called when the
    outermost one is over; `on_engine_start` is told what one begins from. It must not be stopped and started again
    inside one op. On CUDA the allocator's counters tell; its peak starts anew at each mark.
    """

    MARK = "remat: mark"

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._profiler: AllocationProfiler | None = None
        self._is_over = False
        """Whether it was stopped in a backward, which is still under way."""
        self._windows: list[Window] = []
        self._peak: CudaPeak | None = None
        self._on_engine_start: Callable[[Sequence[torch.Tensor]], None] = lambda roots: None
        self._on_engine_return: Callable[[], None] = lambda: None
        self.allocated: frozenset[int] | None = None
        """Addresses that were handed out before the last stop; None where nobody tells."""

    @property
    def is_running(self) -> bool:
        return self._device is not None and not self._is_over

    @property
    def device_type(self) -> str:
        """Where it looks; empty while it does not."""
        return self._device.type if self._device is not None and self.is_running else ""

    def start(
        self,
        device: torch.device,
        on_engine_start: Callable[[Sequence[torch.Tensor]], None],
        on_engine_return: Callable[[], None],
    ) -> None:
        """Begin anew."""
        self._windows, self._on_engine_start, self._on_engine_return = [], on_engine_start, on_engine_return
        if device.type == "cuda":
            self._peak = CudaPeak(device)
            self._peak.open()
        elif profiler_is_running():
            # Another profiler watches this step already; a later step will do.
            return
        else:
            self._profiler = AllocationProfiler()
            self._profiler.start()
        self._device = device
        watch_engine(self)

    def mark(self) -> None:
        """A window ends here."""
        if self._peak is not None:
            self._windows.append(Window(self._peak.take(), torch.cuda.memory_allocated(self._device)))
        elif self._device is not None:
            with op_range(self.MARK):
                return

    def stop(self) -> list[Window]:
        """The windows between the start, the marks and now; none where nobody looked, or can tell yet."""
        if self._device is None:
            return []
        self._is_over = self._profiler is not None and in_backward()
        if self._is_over:
            return []
        self.mark()
        profiler, self._profiler, self._device = self._profiler, None, None
        unwatch_engine(self)
        if self._peak is not None:
            self._peak.close()
            self._peak = None
        if profiler is None:
            return self._windows
        if not profiler_is_running():
            # There can be only one.
            profiler.leave()
            return []
        profiler.stop()
        events = cpu_allocation_events(profiler, self.MARK)
        self.allocated = frozenset(address for address, size in events if size > 0)
        return list(_windows(events))

    def engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        self._on_engine_start(roots)

    def engine_returned(self) -> None:
        if in_backward():
            # It was a backward that another one has called.
            return
        if self._is_over:
            self.stop()
        else:
            self._on_engine_return()


def _windows(events: Iterable[tuple[int, int]]) -> Iterator[Window]:
    """Windows from (address, bytes) of allocations and frees; a mark has address 0."""
    current = peak = 0
    live: dict[int, int] = {}
    for address, size in events:
        if address == 0:
            yield Window(peak, current)
            peak = current
        elif size > 0:
            live[address] = size
            current += size
            peak = max(peak, current)
        else:
            # What was there before may die now, for whatever reason: it was not counted.
            current -= live.pop(address, 0)
