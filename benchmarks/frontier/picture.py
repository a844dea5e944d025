"""Time of a step against its peak memory: peers as marks with the line of the best of them, ours as a line.

In: `Results`. Out: a PNG or SVG file, by its suffix. Lower and further left is better. Peers that were helped are
hollow. The frame is that of compiled code; what lies outside is told in the legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.frontier.rows import Results, Row

from remat.report.pictures.picture import MUTED, choose_scale, dress, open_axes, save_picture, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "#0b7285"
_MARKS = "sv^<>DPX*dph"
_MARGIN = 0.08


@dataclass(frozen=True, slots=True)
class Point:
    family: str
    is_ours: bool
    helped: bool
    peak: float
    """In the unit of the axis."""
    step_ms: float


def draw_frontier(results: Results, path: Path) -> Path | None:
    """The picture, or None where nothing ran."""
    rows = [row for row in results.rows if row.ran]
    if not rows:
        return None
    axes = open_axes(path, (0.075, 0.125, 0.6, 0.69))
    scale = choose_scale(max(row.peak_bytes or 0 for row in rows))
    points = [_point(row, scale.size_bytes) for row in rows]
    _frame(axes, [point for point in points if not point.family.startswith("eager")] or points)
    _draw_peers(axes, [point for point in points if not point.is_ours], scale.unit)
    families = dict.fromkeys(point.family for point in points if point.is_ours)
    for family, line in zip(families, ("o-", "o--"), strict=False):
        ours = sorted((point.peak, point.step_ms) for point in points if point.family == family)
        axes.plot(*zip(*ours, strict=True), line, color=_OURS, linewidth=2.2, markersize=6, label=family)
    dress(axes, across=f"measured peak ({scale.unit})", upward="step (ms)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8)
    write_title(axes, f"{results.model}: what memory costs", f"batch {results.batch}, {results.device}")
    return save_picture(axes, path)


def best_line(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The places that no other one beats in both, by peak."""
    kept: list[tuple[float, float]] = []
    for place in sorted(places):
        if not kept or place[1] < kept[-1][1]:
            kept.append(place)
    return kept


def _point(row: Row, unit_bytes: int) -> Point:
    return Point(_family(row), row.is_ours, "+" in row.name, (row.peak_bytes or 0) / unit_bytes, row.step_ms)


def _family(row: Row) -> str:
    """What shares a mark: the budgets of one way, and the same way helped and not."""
    name = row.name.split("+")[0]
    if row.is_ours:
        return "Remat, eager kernels" if name.startswith("ours-eager") else "Remat"
    if name.startswith("compile-budget"):
        return "compile, activation_memory_budget"
    helped = name != row.name
    return row.label.rsplit(", ", 1)[0] if helped else row.label


def _frame(axes: Axes, points: Sequence[Point]) -> None:
    across, upward = [point.peak for point in points], [point.step_ms for point in points]
    axes.set_xlim(0, max(across) * (1 + _MARGIN))
    room = _MARGIN * (max(upward) - min(upward)) or _MARGIN * max(upward)
    axes.set_ylim(min(upward) - room, max(upward) + room)


def _draw_peers(axes: Axes, peers: Sequence[Point], unit: str) -> None:
    for number, family in enumerate(dict.fromkeys(point.family for point in peers)):
        members = [point for point in peers if point.family == family]
        outside = [point for point in members if not _is_inside(axes, point)]
        told = "".join(f" ({point.peak:.1f} {unit}, {point.step_ms:.0f} ms)" for point in outside[:1])
        for helped in (False, True):
            places = [(point.peak, point.step_ms) for point in members if point.helped is helped]
            if places:
                fill = "none" if helped else "full"
                label = None if helped and len(members) > len(places) else family + told
                style = {"color": f"C{number % 10}", "markersize": 6, "fillstyle": fill, "linestyle": ""}
                axes.plot(*zip(*places, strict=True), marker=_MARKS[number % len(_MARKS)], label=label, **style)
    best = best_line([(point.peak, point.step_ms) for point in peers])
    if best:
        # Between two peaks the peer of the smaller one fits, and beyond the last one that.
        line = [*best, (max(axes.get_xlim()[1], best[-1][0]), best[-1][1])]
        style = {"drawstyle": "steps-post", "color": MUTED, "linewidth": 1.2, "label": "best peer that fits"}
        axes.plot(*zip(*line, strict=True), **style)


def _is_inside(axes: Axes, point: Point) -> bool:
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return left <= point.peak <= right and bottom <= point.step_ms <= top
