"""Profiles as versioned JSON, in columns: one list for each field of ops and storages, every text written once.

Positions of ops are written one higher than they are, so that 0 stands for before the step. Loading trusts nothing:
after the fields have been checked, the storages must add up to what the ops say was in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from remat.core.document import Record, read_document, write_document
from remat.core.results.profile import MemoryClass, Phase, ProfiledOp, ProfiledStorage, StepProfile
from remat.errors import FileFormatError

FORMAT, VERSION = "remat-profile", 1

Choice = TypeVar("Choice", bound=StrEnum)


def save_profile(profile: StepProfile, path: Path) -> None:
    """Write `profile` as JSON; the file appears whole or not at all."""
    write_document(path, encode_profile(profile))


def encode_profile(profile: StepProfile) -> dict[str, object]:
    texts = _Texts()
    ops, storages = _encode_ops(profile.ops, texts), _encode_storages(profile.storages, texts)
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": profile.name,
        "device": profile.device,
        "torch_version": profile.torch_version,
        "start_bytes": profile.start_bytes,
        "seconds": profile.seconds,
        "reserved_bytes": profile.reserved_bytes,
        "is_estimate": profile.is_estimate,
        "stopped_by": profile.stopped_by,
        "texts": list(texts.numbers),
        "ops": ops,
        "storages": storages,
    }


def load_profile(path: Path) -> StepProfile:
    """Read a profile and check it against itself; a damaged or foreign file is a `FileFormatError`."""
    return decode_profile(read_document(path, {FORMAT: VERSION}), path)


def decode_profile(record: Record, path: Path) -> StepProfile:
    """The profile of a file that was read already, checked against itself."""
    texts = record.texts("texts")
    ops = _decode_ops(_Columns(record.record("ops"), texts))
    profile = StepProfile(
        name=record.text("name"),
        device=record.text("device"),
        torch_version=record.text("torch_version"),
        ops=ops,
        storages=_decode_storages(_Columns(record.record("storages"), texts), len(ops)),
        start_bytes=record.integer("start_bytes"),
        seconds=record.number("seconds"),
        reserved_bytes=record.integer("reserved_bytes"),
        is_estimate=record.flag("is_estimate"),
        stopped_by=record.text("stopped_by"),
    )
    _check_sums(profile, path)
    return profile


def _encode_ops(ops: Sequence[ProfiledOp], texts: _Texts) -> dict[str, object]:
    return {
        "target": texts.encode(op.target for op in ops),
        "module": texts.encode(op.module for op in ops),
        "phase": texts.encode(op.phase.value for op in ops),
        "time_ns": [op.time_ns for op in ops],
        "allocated_bytes": [op.allocated_bytes for op in ops],
        "freed_bytes": [op.freed_bytes for op in ops],
        "workspace_bytes": [op.workspace_bytes for op in ops],
        "live_bytes": [op.live_bytes for op in ops],
    }


def _decode_ops(columns: _Columns) -> tuple[ProfiledOp, ...]:
    rows = columns.together(
        columns.texts("target"),
        columns.texts("module"),
        columns.choices("phase", Phase),
        columns.record.numbers("time_ns"),
        columns.record.integers("allocated_bytes"),
        columns.record.integers("freed_bytes"),
        columns.record.integers("workspace_bytes"),
        columns.record.integers("live_bytes"),
    )
    return tuple(ProfiledOp(*row) for row in rows)


def _encode_storages(storages: Sequence[ProfiledStorage], texts: _Texts) -> dict[str, object]:
    return {
        "kind": texts.encode(item.kind.value for item in storages),
        "size_bytes": [item.size_bytes for item in storages],
        "name": texts.encode(item.name for item in storages),
        "module": texts.encode(item.module for item in storages),
        "created": [item.created + 1 for item in storages],
        "freed": [item.freed + 1 for item in storages],
        "last_forward_use": [item.last_forward_use + 1 for item in storages],
        "first_backward_use": [item.first_backward_use + 1 for item in storages],
        "recompute_ns": [item.recompute_ns for item in storages],
        "value": [item.value + 1 for item in storages],
    }


def _decode_storages(columns: _Columns, op_count: int) -> tuple[ProfiledStorage, ...]:
    rows = columns.together(
        columns.choices("kind", MemoryClass),
        columns.record.integers("size_bytes"),
        columns.texts("name"),
        columns.texts("module"),
        columns.positions("created", op_count),
        columns.positions("freed", op_count + 1),
        columns.positions("last_forward_use", op_count),
        columns.positions("first_backward_use", op_count),
        columns.record.numbers("recompute_ns"),
        tuple(number - 1 for number in columns.record.integers("value")),
    )
    return tuple(ProfiledStorage(*row) for row in rows)


class _Texts:
    """Numbers for texts, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def encode(self, column: Iterable[str]) -> list[int]:
        return [self.numbers.setdefault(text, len(self.numbers)) for text in column]


@dataclass(frozen=True, slots=True)
class _Columns:
    record: Record
    known: tuple[str, ...]

    def texts(self, key: str) -> tuple[str, ...]:
        numbers = self.record.integers(key)
        if any(number >= len(self.known) for number in numbers):
            raise FileFormatError(f"{self.record.where}: `{key}` names a text that is not there; write the file again.")
        return tuple(self.known[number] for number in numbers)

    def choices(self, key: str, kind: type[Choice]) -> tuple[Choice, ...]:
        found = self.texts(key)
        names = [member.value for member in kind]
        bad = next((text for text in found if text not in names), None)
        if bad is not None:
            raise FileFormatError(f"{self.record.where}: `{key}` is {bad!r:.60}; it must be one of {', '.join(names)}.")
        return tuple(kind(text) for text in found)

    def positions(self, key: str, limit: int) -> tuple[int, ...]:
        """From `BEFORE` up to, but not including, `limit`."""
        found = self.record.integers(key)
        if any(number > limit for number in found):
            raise FileFormatError(f"{self.record.where}: `{key}` names an op that is not there; write the file again.")
        return tuple(number - 1 for number in found)

    def together(self, *columns: tuple[Any, ...]) -> Iterable[tuple[Any, ...]]:
        if len({len(column) for column in columns}) > 1:
            raise FileFormatError(f"{self.record.where} has columns of different lengths; write the file again.")
        return zip(*columns, strict=True)


def _check_sums(profile: StepProfile, path: Path) -> None:
    lines = profile.bytes_by_class().values()
    for position, (parts, total) in enumerate(zip(zip(*lines, strict=True), profile.during_bytes, strict=True)):
        if sum(parts) != total:
            raise FileFormatError(
                f"{path} says that {total} bytes are in memory at op {position}, but its storages make {sum(parts)}; "
                "write it again."
            )
