"""What was measured, and its file: one `Results` for each model, written anew after every row.

In: rows as they come. Out: `frontier_MODEL.json`, format "remat-frontier", read back with every field checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.runs import note_run

from remat.core.document import Record, read_document, write_document

FORMAT, VERSION = "remat-frontier", 1


class Status(StrEnum):
    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration; the figures are None where it did not run."""

    name: str
    label: str
    is_ours: bool
    status: Status
    reason: str = ""
    rounds_ms: tuple[tuple[float, ...], ...] = ()
    """Times of the steps of every round."""
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    first_peak_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_ms: float | None = None
    """By the plan, after the steps that warm up the first round."""
    kernels_ms: float | None = None
    """By kernels timed alone, before any step."""
    budget_bytes: int | None = None
    prepare_s: float | None = None
    graphs: int | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    gap: float | None = None
    copies: int | None = None
    host_bytes: int | None = None
    waited_ms: float | None = None
    digest: str | None = None

    @property
    def ran(self) -> bool:
        return self.status is Status.RAN and self.peak_bytes is not None and bool(self.rounds_ms)

    @property
    def step_ms(self) -> float:
        """The median of the fastest round: whatever else the machine does makes rounds slower, never faster."""
        return min(statistics.median(times) for times in self.rounds_ms)

    @property
    def spread(self) -> float:
        """How far the rounds' medians lie apart, as a share."""
        medians = [statistics.median(times) for times in self.rounds_ms]
        return max(medians) / min(medians) - 1


@dataclass(frozen=True, slots=True)
class Results:
    model: str
    batch: int
    device: str
    torch_version: str
    caches: str
    """Whether compiled code of an earlier run was there."""
    rows: tuple[Row, ...] = ()


def save_results(results: Results, path: Path) -> None:
    write_document(path, {"format": FORMAT, "version": VERSION, **asdict(results)})
    note_run(path, results.device)


def load_results(path: Path) -> Results:
    record = read_document(path, {FORMAT: VERSION})
    rows = tuple(_row(item) for item in record.records("rows"))
    names = ("model", "device", "torch_version", "caches")
    return Results(**{name: record.text(name) for name in names}, batch=record.integer("batch"), rows=rows)


def _row(record: Record) -> Row:
    rounds = [
        Record({"times": item}, f"{record.where}: rounds_ms[{index}]").numbers("times")
        for index, item in enumerate(record.items("rounds_ms"))
    ]
    counts = ("peak_bytes", "reserved_bytes", "first_peak_bytes", "predicted_bytes", "budget_bytes", "graphs")
    counts += ("copies", "host_bytes")
    amounts = ("predicted_ms", "kernels_ms", "prepare_s", "loss", "gradient_norm", "gap", "waited_ms")
    return Row(
        record.text("name"),
        record.text("label"),
        record.flag("is_ours"),
        Status(record.text("status")),
        record.text("reason"),
        tuple(rounds),
        **{name: _optional(record, name, record.integer) for name in counts},
        **{name: _optional(record, name, record.number) for name in amounts},
        digest=_optional(record, "digest", record.text),
    )


def _optional(record: Record, name: str, read: Callable[[str], Any]) -> Any:
    return None if record.fields.get(name) is None else read(name)
