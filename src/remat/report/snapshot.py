"""A report as a memory snapshot for pytorch.org/memory_viz, as `torch.cuda.memory._dump_snapshot` writes them.

In: a `Report`. Out: a pickle of plain dicts, lists, strings and numbers. The step before is device 0, the step after
device 1; each storage is allocated when it is made and freed when it is dropped, with the op and module that made it in
place of a stack. Addresses are first fit in one segment, so that no two live storages overlap.
"""

from __future__ import annotations

import pickle
from bisect import insort
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat.core.document import write_bytes
from remat.core.results.profile import BEFORE, ProfiledStorage, StepProfile
from remat.report.contents.gathered import Report
from remat.report.contents.samples import clock

_BASE = 0x7F0000000000
_SEGMENT_BYTES = 512
"""Allocations start at multiples of this, as CUDA's allocator has it."""


def write_snapshot(report: Report, path: Path) -> Path:
    # The page reads pickles of this protocol at most.
    write_bytes(path, pickle.dumps(snapshot(report), protocol=4))
    return path


def snapshot(report: Report) -> dict[str, Any]:
    devices = [_device(number, step) for number, (_, step) in enumerate(report.steps)]
    return {
        "segments": [segment for segment, _ in devices if segment["total_size"]],
        "device_traces": [events for _, events in devices],
        "allocator_settings": {},
        "external_annotations": [],
    }


@dataclass(slots=True)
class _Arena:
    """First fit: the lowest hole that is large enough."""

    blocks: list[tuple[int, int]] = field(default_factory=list)
    """(offset, end) of what is live, by offset."""
    end: int = 0

    def place(self, size: int) -> int:
        offset = 0
        for start, end in self.blocks:
            if start - offset >= size:
                break
            offset = max(offset, _rounded(end))
        insort(self.blocks, (offset, offset + size))
        self.end = max(self.end, _rounded(offset + size))
        return offset

    def drop(self, offset: int, size: int) -> None:
        self.blocks.remove((offset, offset + size))


def _rounded(size: int) -> int:
    return -(-size // _SEGMENT_BYTES) * _SEGMENT_BYTES


def _device(device: int, step: StepProfile) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The segment as it is left, and what happened in it."""
    starts, arena, base = clock(step), _Arena(), _BASE + (device << 42)
    made, dropped = _by_position(step)
    live: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for position in range(BEFORE, len(step.ops)):
        moment = int(starts[max(0, position)] / 1e3)
        for number, item in made.get(position, ()):
            live[number] = _event("alloc", base + arena.place(item.size_bytes), item, position, moment)
            events.append(live[number])
        events += _workspace(step, position, base + arena.end, moment)
        for number, item in dropped.get(position, ()):
            gone = live.pop(number)
            arena.drop(gone["addr"] - base, item.size_bytes)
            ended = int(starts[position + 1] / 1e3)
            events += [{**gone, "action": action, "time_us": ended} for action in ("free_requested", "free_completed")]
    room = arena.end + _rounded(max((op.workspace_bytes for op in step.ops), default=0))
    return _segment(device, base, room, list(live.values())), events


def _by_position(step: StepProfile) -> tuple[dict[int, list[tuple[int, ProfiledStorage]]], ...]:
    made: dict[int, list[tuple[int, ProfiledStorage]]] = {}
    dropped: dict[int, list[tuple[int, ProfiledStorage]]] = {}
    for number, item in enumerate(step.storages):
        if item.size_bytes:
            made.setdefault(item.created, []).append((number, item))
            dropped.setdefault(item.freed, []).append((number, item))
    return made, dropped


def _event(action: str, address: int, item: ProfiledStorage, position: int, moment: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": item.size_bytes,
        "stream": 0,
        "time_us": moment,
        "frames": [_frame(item.name, item.module, position), _frame(item.kind.value, "class", 0)],
    }


def _workspace(step: StepProfile, position: int, address: int, moment: int) -> list[dict[str, Any]]:
    """What an op needs only while it runs: there and gone, above everything else."""
    if position == BEFORE or not step.ops[position].workspace_bytes:
        return []
    op = step.ops[position]
    event = {
        "addr": address,
        "size": op.workspace_bytes,
        "stream": 0,
        "time_us": moment,
        "frames": [_frame(f"workspace of {op.target}", op.module, position)],
    }
    return [{"action": action, **event} for action in ("alloc", "free_requested", "free_completed")]


def _frame(name: str, module: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": module or "(no module)", "line": max(0, line)}


def _segment(device: int, base: int, size: int, live: list[dict[str, Any]]) -> dict[str, Any]:
    held = sum(event["size"] for event in live)
    return {
        "device": device,
        "address": base,
        "total_size": size,
        "allocated_size": held,
        "active_size": held,
        "requested_size": held,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(_blocks(base, size, sorted(live, key=lambda event: event["addr"]))),
    }


def _blocks(base: int, size: int, live: list[dict[str, Any]]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []

    def add(address: int, length: int, state: str, frames: list[dict[str, Any]]) -> None:
        if length:
            block = {"address": address, "size": length, "requested_size": length, "state": state, "frames": frames}
            blocks.append(block)

    reached = base
    for event in live:
        add(reached, event["addr"] - reached, "inactive", [])
        add(event["addr"], event["size"], "active_allocated", event["frames"])
        reached = event["addr"] + event["size"]
    add(reached, base + size - reached, "inactive", [])
    return blocks
