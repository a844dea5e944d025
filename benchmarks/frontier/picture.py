"""Time of a step against its peak memory: peers as marks with the line of the best of them, ours as a line.

In: `Results`. Out: a PNG or SVG file, by its suffix. Lower and further left is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.frontier.rows import Results, Row

from remat.report.picture import MUTED, choose_scale, dress, open_axes, save_picture, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "#0b7285"
_MARKS = "sv^<>DPX*dph"


def draw_frontier(results: Results, path: Path) -> Path | None:
    """The picture, or None where nothing ran."""
    rows = [row for row in results.rows if row.ran]
    if not rows:
        return None
    axes = open_axes(path, (0.075, 0.125, 0.6, 0.69))
    scale = choose_scale(max(row.peak_bytes or 0 for row in rows))

    def place(row: Row) -> tuple[float, float]:
        return (row.peak_bytes or 0) / scale.size_bytes, row.step_ms

    peers = [row for row in rows if not row.is_ours]
    _draw_peers(axes, peers, [place(row) for row in peers])
    ours = sorted(place(row) for row in rows if row.is_ours)
    if ours:
        axes.plot(*zip(*ours, strict=True), "o-", color=_OURS, linewidth=2.2, markersize=6, label="Remat")
    dress(axes, across=f"measured peak ({scale.unit})", upward="step (ms)")
    axes.set_xlim(left=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    write_title(axes, f"{results.model}: what memory costs", f"batch {results.batch}, {results.device}")
    return save_picture(axes, path)


def _draw_peers(axes: Axes, peers: Sequence[Row], places: Sequence[tuple[float, float]]) -> None:
    for number, (row, place) in enumerate(zip(peers, places, strict=True)):
        mark = _MARKS[number % len(_MARKS)]
        axes.plot(*place, mark, color=f"C{number % 10}", markersize=6, linestyle="", label=row.label)
    best = best_line(places)
    if best:
        # Between two peaks the peer of the smaller one fits.
        axes.plot(
            *zip(*best, strict=True), drawstyle="steps-post", color=MUTED, linewidth=1.2, label="best peer that fits"
        )


def best_line(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The places that no other one beats in both, by peak."""
    kept: list[tuple[float, float]] = []
    for place in sorted(places):
        if not kept or place[1] < kept[-1][1]:
            kept.append(place)
    return kept
