"""A report as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

In: a `Report`. Out: a JSON file in the Trace Event Format: each step is a process, each phase a track of slices, and
each class of memory a counter; copies to the host and back are two more tracks. Times are microseconds from the start
of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from remat.core.document import write_text
from remat.core.results.profile import MemoryClass, Phase, StepProfile
from remat.report.contents.gathered import Report
from remat.report.contents.samples import clock
from remat.report.contents.summary import short_target

_TRACKS = {phase: number for number, phase in enumerate(Phase, start=1)}
_ENGINES = {False: (len(_TRACKS) + 1, "copies to the host"), True: (len(_TRACKS) + 2, "copies back")}


def write_trace(report: Report, path: Path) -> Path:
    write_text(path, json.dumps(trace(report), separators=(",", ":"), allow_nan=False))
    return path


def trace(report: Report) -> dict[str, object]:
    events: list[dict[str, object]] = []
    for process, (title, step) in enumerate(report.steps, start=1):
        events += _names(process, title, step)
        events += _slices(process, step)
        events += _copies(process, step)
        events += _counters(process, step)
    return {"displayTimeUnit": "ms", "otherData": {"name": report.name}, "traceEvents": events}


def _names(process: int, title: str, step: StepProfile) -> Iterator[dict[str, object]]:
    def event(kind: str, track: int, **arguments: object) -> dict[str, object]:
        return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": arguments}

    yield event("process_name", 0, name=title)
    yield event("process_sort_index", 0, sort_index=process)
    used = {op.phase for op in step.ops}
    for phase, track in _TRACKS.items():
        if phase in used:
            yield event("thread_name", track, name=phase.value)
            yield event("thread_sort_index", track, sort_index=track)
    for is_back in sorted({copy.is_back for copy in step.copies}):
        track, name = _ENGINES[is_back]
        yield event("thread_name", track, name=name)
        yield event("thread_sort_index", track, sort_index=track)


def _slices(process: int, step: StepProfile) -> Iterator[dict[str, object]]:
    starts = clock(step)
    for number, op in enumerate(step.ops):
        yield {
            "ph": "X",
            "name": short_target(op.target),
            "cat": op.phase.value,
            "pid": process,
            "tid": _TRACKS[op.phase],
            "ts": starts[number] / 1e3,
            "dur": (starts[number + 1] - starts[number]) / 1e3,
            "args": {
                "target": op.target,
                "module": op.module,
                "op": number,
                "live_bytes": op.live_bytes,
                "workspace_bytes": op.workspace_bytes,
                "allocated_bytes": op.allocated_bytes,
                "freed_bytes": op.freed_bytes,
            },
        }
    if step.ops:
        peak = {"ph": "i", "s": "p", "name": "peak", "pid": process, "tid": _TRACKS[step.ops[step.peak_op].phase]}
        yield {**peak, "ts": starts[step.peak_op] / 1e3, "args": {"bytes": step.peak_bytes}}


def _copies(process: int, step: StepProfile) -> Iterator[dict[str, object]]:
    for copy in step.copies:
        yield {
            "ph": "X",
            "name": copy.name,
            "cat": "copy",
            "pid": process,
            "tid": _ENGINES[copy.is_back][0],
            "ts": copy.start_ns / 1e3,
            "dur": (copy.end_ns - copy.start_ns) / 1e3,
            "args": {"module": copy.module, "bytes": copy.size_bytes},
        }


def _counters(process: int, step: StepProfile) -> Iterator[dict[str, object]]:
    """One counter for each class, and one for all of them; after the last op only what outlives the step is left."""
    starts = clock(step)
    lines = {kind: line for kind, line in step.bytes_by_class().items() if any(line)}
    end = {kind: _left(step, kind) for kind in lines}
    moments = [*({kind: line[number] for kind, line in lines.items()} for number in range(len(step.ops))), end]
    for start, found in zip(starts, moments, strict=True):
        yield _counter(process, "memory", start, sum(found.values()))
        for kind, size in found.items():
            yield _counter(process, kind.value, start, size)


def _counter(process: int, name: str, start_ns: float, size: int) -> dict[str, object]:
    return {"ph": "C", "name": name, "pid": process, "ts": start_ns / 1e3, "args": {"bytes": size}}


def _left(step: StepProfile, kind: MemoryClass) -> int:
    return sum(item.size_bytes for item in step.storages if item.kind is kind and item.freed >= len(step.ops))
