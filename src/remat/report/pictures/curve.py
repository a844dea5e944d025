"""A picture of what memory costs: time over the plain step against the budget, every strategy and the proven bound.

In: a `Chart`. Out: a PNG or SVG file, by its suffix. The lead and its bound set the scale; a strategy that leaves the
picture at the top is slower than that. What was measured is shown as rings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from remat.report.pictures.picture import Scale, choose_scale, dress, open_axes, save_picture, write_title
from remat.report.tables.chart import Chart, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEAD, _BOUND = "#0b7285", "#c92a2a"
_MARKS = "sv^<>DPX*dph"
_HEADROOM = 1.6


def draw_curve(path: Path, chart: Chart) -> Path:
    """Draw overhead in per cent over budget; the largest budget is on the left."""
    axes = open_axes(path, (0.075, 0.125, 0.705, 0.69))
    unit = choose_scale(max((budget for line in (chart.lead, *chart.others) for budget in line.budgets), default=1))
    for number, line in enumerate(chart.others):
        color, mark = f"C{number % 10}", _MARKS[number % len(_MARKS)]
        across, upward = _scaled(line, unit)
        axes.plot(across, upward, label=line.name, color=color, marker=mark, linewidth=1, markersize=4, alpha=0.75)
    across, times = _scaled(chart.lead, unit)
    bounds = [100 * bound for bound in chart.bounds]
    axes.plot(across, times, label=chart.lead.name, color=_LEAD, linewidth=2.4, marker="o", markersize=5)
    axes.plot(across, bounds, label="proven bound", color=_BOUND, linewidth=1.3, linestyle=(0, (5, 3)))
    axes.fill_between(across, bounds, times, color=_LEAD, alpha=0.15, linewidth=0)
    if chart.measured is not None:
        across, times = _scaled(chart.measured, unit)
        axes.plot(
            across, times, label="measured", color=_LEAD, linestyle="", marker="o", markersize=9, markerfacecolor="none"
        )
    _frame(axes, 100 * chart.top)
    dress(axes, across=f"budget ({unit.unit})", upward="time over the plain step (%)")
    title = f"What memory costs: {chart.name}"
    write_title(axes, title, "Extra time of the schedule found at each budget, and proven bound")
    return save_picture(axes, path)


def _scaled(line: Line, unit: Scale) -> tuple[list[float], list[float]]:
    return [budget / unit.size_bytes for budget in line.budgets], [100 * over for over in line.overheads]


def _frame(axes: Axes, top: float) -> None:
    axes.invert_xaxis()
    axes.set_ylim(-0.02 * top, _HEADROOM * top)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5)
