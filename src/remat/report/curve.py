"""A picture of what memory costs: time over the plain step against the budget, every solver and the proven bound.

In: the points of a sweep. Out: a PNG or SVG file, by its suffix. The lead and its bound set the scale; a solver that
leaves the picture at the top is slower than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remat.report.picture import choose_scale, dress, open_axes, save_picture, write_title
from remat.report.sweep import bound_of, lead_of, overhead_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from remat.solvers.sweep import Point

_LEAD, _BOUND = "#0b7285", "#c92a2a"
_MARKS = "sv^<>DPX*dph"
_HEADROOM = 1.6


def draw_curve(path: Path, points: Sequence[Point], base_time: float, name: str) -> Path:
    """Draw overhead in per cent over budget; the largest budget is on the left."""
    axes = open_axes(path, (0.075, 0.125, 0.705, 0.69))
    lead = lead_of(points)
    names = list(dict.fromkeys(point.solver for point in points if point.solver != lead))
    unit = choose_scale(max((point.budget_bytes for point in points), default=1))

    def line(solver: str, value: Callable[[Point, float], float | None]) -> tuple[list[float], list[float]]:
        fitting = [point for point in points if point.solver == solver and point.solution is not None]
        across = [point.budget_bytes / unit.size_bytes for point in fitting]
        return across, [100 * (value(point, base_time) or 0.0) for point in fitting]

    for number, other in enumerate(names):
        color, mark = f"C{number % 10}", _MARKS[number % len(_MARKS)]
        axes.plot(
            *line(other, overhead_of), label=other, color=color, marker=mark, linewidth=1, markersize=4, alpha=0.75
        )
    across, times = line(lead, overhead_of)
    _, bounds = line(lead, bound_of)
    axes.plot(across, times, label=lead, color=_LEAD, linewidth=2.4, marker="o", markersize=5)
    axes.plot(across, bounds, label="proven bound", color=_BOUND, linewidth=1.3, linestyle=(0, (5, 3)))
    axes.fill_between(across, bounds, times, color=_LEAD, alpha=0.15, linewidth=0)
    _frame(axes, max((*times, 0.1)))
    dress(axes, across=f"budget ({unit.unit})", upward="time over the plain step (%)")
    write_title(axes, f"What memory costs: {name}", "Extra time of the schedule found at each budget, and proven bound")
    return save_picture(axes, path)


def _frame(axes: Axes, top: float) -> None:
    axes.invert_xaxis()
    axes.set_ylim(-0.02 * top, _HEADROOM * top)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5)
