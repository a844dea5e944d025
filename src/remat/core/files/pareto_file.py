"""Pareto curves as versioned JSON, checked on load: every point within its budget, bound and order.

In: a `Pareto` or a path. Out: a document, or the `Pareto` that it holds.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from remat.core.document import Record, read_document, write_document
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.errors import FileFormatError

FORMAT, VERSION = "remat-pareto", 1
_TOLERANCE = 1e-9


def encode_pareto(pareto: Pareto) -> dict[str, object]:
    """The fields of the file, which `--json` prints too."""
    return {"format": FORMAT, "version": VERSION, **asdict(pareto)}


def save_pareto(pareto: Pareto, path: Path) -> None:
    write_document(path, encode_pareto(pareto))


def load_pareto(path: Path) -> Pareto:
    return decode_pareto(read_document(path, {FORMAT: VERSION}), path)


def decode_pareto(record: Record, path: Path) -> Pareto:
    pareto = Pareto(
        name=record.text("name"),
        device=record.text("device"),
        plain_peak_bytes=record.integer("plain_peak_bytes"),
        base_time_ns=record.number("base_time_ns"),
        floor_bytes=record.integer("floor_bytes"),
        points=tuple(map(_point, record.records("points"))),
        baselines=tuple(map(_point, record.records("baselines"))),
    )
    _check_order(pareto, path)
    return pareto


def _point(record: Record) -> ParetoPoint:
    point = ParetoPoint(
        solver=record.text("solver"),
        budget_bytes=record.integer("budget_bytes"),
        peak_bytes=record.integer("peak_bytes"),
        time_ns=record.number("time_ns"),
        bound_ns=record.number("bound_ns"),
        measured_peak_bytes=None
        if _is_absent(record, "measured_peak_bytes")
        else record.integer("measured_peak_bytes"),
        measured_ratio=None if _is_absent(record, "measured_ratio") else record.number("measured_ratio"),
    )
    if point.peak_bytes > point.budget_bytes:
        raise FileFormatError(
            f"{record.where}: the peak of {point.peak_bytes} bytes is over the budget of {point.budget_bytes}; "
            "make the curve again."
        )
    if point.bound_ns > point.time_ns * (1 + _TOLERANCE):
        raise FileFormatError(f"{record.where}: the bound is above the time that was found; make the curve again.")
    return point


def _is_absent(record: Record, key: str) -> bool:
    return record.fields.get(key) is None


def _check_order(pareto: Pareto, path: Path) -> None:
    for larger, smaller in zip(pareto.points, pareto.points[1:], strict=False):
        if smaller.budget_bytes >= larger.budget_bytes:
            raise FileFormatError(f"{path}: the budgets of `points` do not fall; list the largest first.")
        if smaller.time_ns < larger.time_ns * (1 - _TOLERANCE):
            raise FileFormatError(
                f"{path}: the point at {smaller.budget_bytes} bytes is faster than the one at {larger.budget_bytes}, "
                "though its schedule fits there too; make the curve again."
            )
