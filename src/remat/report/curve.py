"""A picture of what memory costs: time over the plain step against the budget, every solver and the proven bound.

In: the points of a sweep, or a `Pareto`. Out: a PNG or SVG file, by its suffix, or lines on given axes. In a sweep the
lead and its bound set the scale; a solver that leaves the picture at the top is slower than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remat.report.picture import choose_scale, dress, open_axes, save_picture, write_title
from remat.report.sweep import bound_of, lead_of, overhead_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from remat.core.pareto import Pareto, ParetoPoint
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


def plot_pareto(axes: Axes, pareto: Pareto) -> None:
    """The fastest schedules known, what is proven impossible (shaded), other strategies and measured points."""
    points = sorted(pareto.points, key=lambda point: point.budget_bytes)
    everything = (*points, *pareto.baselines)
    unit = choose_scale(max([pareto.plain_peak_bytes, *(point.budget_bytes for point in everything)]))

    def place(size_bytes: int, time_ns: float) -> tuple[float, float]:
        return size_bytes / unit.size_bytes, 100 * pareto.overhead(time_ns)

    if points:
        across = [point.budget_bytes / unit.size_bytes for point in points]
        bounds = [max(0.0, 100 * pareto.overhead(point.bound_ns)) for point in points]
        # Between two budgets the bound of the larger holds, and the schedule of the smaller fits.
        axes.fill_between(across, bounds, 0, step="pre", color="#9aa5b1", alpha=0.35, lw=0, label="proven impossible")
        ours = [place(point.budget_bytes, point.time_ns) for point in points]
        end = (pareto.plain_peak_bytes / unit.size_bytes, ours[-1][1])
        line = [*ours, end] if end[0] > ours[-1][0] else ours
        axes.plot(*zip(*line, strict=True), drawstyle="steps-post", color=_LEAD, linewidth=2)
        axes.plot(*zip(*ours, strict=True), "o", color=_LEAD, markersize=5, label="fastest known")
    for number, solver in enumerate(dict.fromkeys(point.solver for point in pareto.baselines)):
        found = [place(point.peak_bytes, point.time_ns) for point in pareto.baselines if point.solver == solver]
        mark = _MARKS[number % len(_MARKS)]
        axes.plot(*zip(*found, strict=True), mark, color=f"C{number % 10}", markersize=6, label=solver)
    measured = [_measured(point, unit.size_bytes) for point in everything]
    real = [point for point in measured if point is not None]
    if real:
        axes.plot(*zip(*real, strict=True), "D", color="#d1582b", fillstyle="none", markersize=7, label="measured")
    axes.axvline(pareto.floor_bytes / unit.size_bytes, color="#52606d", linewidth=1, linestyle=":", label="floor")
    axes.set_ylim(bottom=0)
    dress(axes, across=f"memory ({unit.unit})", upward="extra time (%)")
    axes.legend(loc="upper right", frameon=False, fontsize=8, ncols=2)


def _measured(point: ParetoPoint, unit_bytes: int) -> tuple[float, float] | None:
    if point.measured_peak_bytes is None or point.measured_ratio is None:
        return None
    return point.measured_peak_bytes / unit_bytes, 100 * (point.measured_ratio - 1)


def _frame(axes: Axes, top: float) -> None:
    axes.invert_xaxis()
    axes.set_ylim(-0.02 * top, _HEADROOM * top)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5)
