"""Allocations as torch itself tells of them: the profiler's events on CPU, the allocator's history on CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope, _EventType, _RecordFunctionFast
from torch.autograd import _profiler_enabled

from remat.pytorch._compat.distributed import pause_after_waits


class AllocationProfiler:
    """Torch's profiler of this thread's CPU allocations and ops; one object for one time.

    It looks at ops and at `op_range`, and not at the named ranges of others. Torch's own class looks at these too, and
    when one of them outlives it, as that of an optimizer's step does around its hooks, its end is written into memory
    of the profiler that saw it begin: with the next profiler running, that memory is the next one's.
    """

    def __init__(self) -> None:
        # Its own library announces every start on stderr unless told not to before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._settings = torch.autograd.profiler.profile(profile_memory=True)
        self._results: Any = None
        self._end_pauses: Callable[[], None] = lambda: None

    def start(self) -> None:
        activities = self._settings.kineto_activities
        _prepare_profiler(self._settings.config(create_trace_id=True), activities)
        # The stubs of torch do not know its third argument.
        _enable_profiler(self._settings.config(), activities, {RecordScope.FUNCTION})  # type: ignore[call-arg]
        self._end_pauses = pause_after_waits(profiler_is_running)

    def leave(self) -> None:
        """Somebody else has ended it: what it saw is lost."""
        self._end_pauses()

    def stop(self) -> None:
        self._end_pauses()
        self._results = _disable_profiler()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def take_events(self) -> list[Any]:
        """The roots of what was seen. Results crash now and then if they are still there when Python exits."""
        results, self._results = self._results, None
        return list(results.experimental_event_tree())


def profiler_is_running() -> bool:
    """Whether a profiler of anybody's watches this thread; there can be only one."""
    return bool(_profiler_enabled())


def op_range(name: str) -> Any:
    """A context manager that leaves a named range in the profiler's events; the public one costs ten times as much."""
    return _RecordFunctionFast(name)


@dataclass(frozen=True, slots=True)
class CpuEvents:
    """What a finished profiler saw on the CPU, in order of time."""

    ranges: list[tuple[int, int]]
    """(start, end) in nanoseconds of every range with the name asked for."""
    allocations: list[tuple[int, int, int]]
    """(time in nanoseconds, address, bytes), bytes below zero for a free."""


def cpu_events(profiler: AllocationProfiler, name: str) -> CpuEvents:
    """The ranges called `name` and every allocation; see `cpu_allocation_events`."""
    ranges: list[tuple[int, int]] = []
    allocations: list[tuple[int, int, int]] = []
    pending = profiler.take_events()
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == name:
            ranges.append((event.start_time_ns, event.end_time_ns))
    ranges.sort()
    allocations.sort(key=lambda item: item[0])
    return CpuEvents(ranges, allocations)


def cpu_allocation_events(profiler: AllocationProfiler, mark: str = "") -> list[tuple[int, int]]:
    """(address, bytes) of every CPU allocation and free a finished profiler saw, in order; (0, 0) for each `mark`.

    The public tables only have sums for each op; the event tree has the allocations themselves.
    """
    found: list[tuple[int, int, int]] = []
    pending = profiler.take_events()
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif mark and event.name == mark:
            found.append((event.start_time_ns, 0, 0))
    found.sort(key=lambda item: item[0])
    return [(address, size) for _, address, size in found]


@contextlib.contextmanager
def record_cuda_allocations() -> Iterator[None]:
    """Let the caching allocator keep its history (documented, though its name is private)."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=10_000_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def cuda_allocation_events(device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of what the caching allocator handed out and took back, in order."""
    traces = torch.cuda.memory._snapshot()["device_traces"]
    sign = {"alloc": 1, "free_completed": -1}
    events = traces[device.index or 0] if traces else []
    return [(event["addr"], sign[event["action"]] * event["size"]) for event in events if event["action"] in sign]


def expandable_segments() -> bool:
    """Whether the CUDA allocator makes new segments of pages that it can put together anew."""
    return bool(torch.cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments", False))


def set_expandable_segments(on: bool) -> None:
    # Its name under torch.cuda is deprecated where this one is there.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(f"expandable_segments:{on}")
