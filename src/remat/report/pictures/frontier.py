"""Time against memory on axes of a larger picture: a curve, what is proven impossible, other strategies, real runs.

In: a `Pareto` and empty axes. Out: the axes, drawn on; memory grows to the right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from remat.report.pictures.picture import MUTED, choose_scale, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from remat.core.results.pareto import Pareto, ParetoPoint

_LEAD, _REAL, _SHADE = "#0b7285", "#d1582b", "#9aa5b1"
_MARKS = "sv^<>DPX*dph"


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
        axes.fill_between(across, bounds, 0, step="pre", color=_SHADE, alpha=0.35, lw=0, label="proven impossible")
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
        axes.plot(*zip(*real, strict=True), "D", color=_REAL, fillstyle="none", markersize=7, label="measured")
    axes.axvline(pareto.floor_bytes / unit.size_bytes, color=MUTED, linewidth=1, linestyle=":", label="floor")
    axes.set_ylim(bottom=0)
    dress(axes, across=f"memory ({unit.unit})", upward="extra time (%)")
    axes.legend(loc="upper right", frameon=False, fontsize=8, ncols=2)


def _measured(point: ParetoPoint, unit_bytes: int) -> tuple[float, float] | None:
    if point.measured_peak_bytes is None or point.measured_ratio is None:
        return None
    return point.measured_peak_bytes / unit_bytes, 100 * (point.measured_ratio - 1)
