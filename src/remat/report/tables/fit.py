"""Ways to train side by side: a table, and a chart of time against memory in plain characters.

In: a `FitSheet`. Out: a `Sheet`, which goes to a terminal or a page, and lines of text.
"""

from __future__ import annotations

from string import ascii_lowercase

from remat.core.budget import format_bytes
from remat.core.results.fit_sheet import FitRow, FitSheet
from remat.report.tables.sheet import Sheet

_WIDTH, _HEIGHT = 60, 14


def fit_sheet(found: FitSheet) -> Sheet:
    is_measured = any(row.measured_peak_bytes is not None for row in found.rows)
    columns: tuple[str, ...] = (
        "",
        "combination",
        "peak",
        "per sample",
        "state",
        "activations",
        "recomputing",
        "waiting",
        "fits",
    )
    columns += ("measured peak", "measured per sample") if is_measured else ()
    rows = tuple(_cells(mark, row, is_measured) for mark, row in zip(_marks(found), found.rows, strict=True))
    note = f"Of one device with {format_bytes(found.capacity_bytes)} for tensors; times are predicted."
    return Sheet(found.title, columns, rows, note)


def fit_chart(found: FitSheet) -> str:
    """Time of a sample upwards, peak memory to the right; | is what a device has."""
    points = [(row.peak_bytes, row.seconds_per_sample) for row in found.rows]
    right = max([found.capacity_bytes, *(peak for peak, _ in points)])
    top = max(seconds for _, seconds in points) or 1.0
    grid = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for line in grid:
        line[round(_WIDTH * found.capacity_bytes / right)] = "|"
    for mark, (peak, seconds) in reversed(list(zip(_marks(found), points, strict=True))):
        grid[_HEIGHT - round(_HEIGHT * seconds / top)][round(_WIDTH * peak / right)] = mark
    lines = ["".join(line).rstrip() for line in grid]
    axis = f"0{'peak of a device'.center(_WIDTH - 11)}{format_bytes(right)}"
    return "\n".join([f"{format_seconds(top)} per sample", *lines, "-" * (_WIDTH + 1), axis])


def format_seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _marks(found: FitSheet) -> list[str]:
    return [ascii_lowercase[place % 26] for place in range(len(found.rows))]


def _cells(mark: str, row: FitRow, is_measured: bool) -> tuple[str, ...]:
    times, memory = dict(row.times), dict(row.memory)
    waiting = sum(times.get(name, 0.0) for name in ("communication", "update", "bubble"))
    cells = (
        mark,
        row.label,
        format_bytes(row.peak_bytes),
        format_seconds(row.seconds_per_sample),
        format_bytes(sum(size for name, size in memory.items() if name != "activations")),
        format_bytes(memory.get("activations", 0)),
        format_seconds(times.get("recompute", 0.0)),
        format_seconds(waiting),
        "yes" if row.fits else "no",
    )
    if not is_measured:
        return cells
    peak = "" if row.measured_peak_bytes is None else format_bytes(row.measured_peak_bytes)
    seconds = row.measured_seconds_per_sample
    return (*cells, peak or row.note, "" if seconds is None else format_seconds(seconds))
