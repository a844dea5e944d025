"""The classic experiments as pictures: peak and step time against batch, savings against overhead, breakdowns.

In: an `Experiment`. Out: PNG and SVG files. Lines and filled marks are measured, hollow marks are predicted; the box is
what others have published.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.results.bench import LIMITS, Bench, BenchTrial, Case, Experiment, Way
from remat.core.results.profile import MemoryClass
from remat.report.contents.palette import CLASS_INK
from remat.report.pictures.picture import choose_scale, dress, open_axes, save_picture, write_title
from remat.report.tables.bench import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
_PLACE = (0.085, 0.125, 0.665, 0.69)
_INK = {
    Way.PLAIN: ("#8d99a6", "o"),
    Way.PER_BLOCK: ("#e67700", "s"),
    Way.SQRT_N: ("#7b5ba6", "^"),
    Way.MU_TWO: ("#2b8a3e", "D"),
    Way.OPTIMAL: ("#0b7285", "o"),
}
_BOX = "#c92a2a"


def draw_bench(bench: Bench, folder: Path) -> list[Path]:
    """All pictures of all models, each as every kind of file."""
    written: list[Path] = []
    for experiment in bench.experiments:
        for name, draw in _PICTURES.items():
            if name == "breakdown" and not experiment.breakdowns:
                continue
            path = folder / f"{name}-{experiment.model}.png"
            axes = open_axes(path, _PLACE)
            draw(axes, experiment)
            written += [save_picture(axes, path.with_suffix(suffix)) for suffix in SUFFIXES]
    return written


def _draw_peak(axes: Axes, experiment: Experiment) -> None:
    trials = [trial for case in experiment.cases for trial in case.trials]
    scale = choose_scale(max(trial.measured.peak_bytes for trial in trials))
    _lines(axes, experiment, lambda case, trial: trial.measured.peak_bytes / scale.size_bytes)
    _lines(axes, experiment, lambda case, trial: trial.predicted.peak_bytes / scale.size_bytes, hollow=True)
    dress(axes, across="batch", upward=f"peak of the step ({scale.unit})")
    write_title(axes, f"Memory against batch: {experiment.model}", "Lines are measured, rings are predicted")
    _frame(axes)


def _draw_time(axes: Axes, experiment: Experiment) -> None:
    _lines(axes, experiment, lambda case, trial: case.step_seconds(trial) * 1e3)
    dress(axes, across="batch", upward="time of a step (ms)")
    subtitle = "Forward and backward, measured: the plain step, and the others by their ratio to it"
    write_title(axes, f"Time against batch: {experiment.model}", subtitle)
    _frame(axes)


def _lines(
    axes: Axes, experiment: Experiment, value: Callable[[Case, BenchTrial], float], *, hollow: bool = False
) -> None:
    """One line for each way over the batches, at the first limit."""
    for way, (color, mark) in _INK.items():
        found = [(case, trial) for case in experiment.cases for trial in case.at(LIMITS[0]) if trial.way is way]
        if not found:
            continue
        across, upward = [case.batch for case, _ in found], [value(case, trial) for case, trial in found]
        if hollow:
            axes.plot(across, upward, color=color, linestyle="", marker="o", markersize=10, markerfacecolor="none")
        else:
            name = label(found[0][1])
            axes.plot(across, upward, label=name, color=color, linewidth=1.8, marker=mark, markersize=5)
    axes.set_xticks([case.batch for case in experiment.cases])


def _frame(axes: Axes) -> None:
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


def _draw_saved(axes: Axes, experiment: Experiment) -> None:
    _box(axes, experiment)
    curve, case = experiment.curve, experiment.largest
    if curve is not None:
        across = [100 * curve.overhead(point.time_ns) for point in curve.points]
        upward = [100 * (1 - point.peak_bytes / curve.plain_peak_bytes) for point in curve.points]
        axes.plot(across, upward, color=_INK[Way.OPTIMAL][0], linewidth=2.2, label="optimal curve")
    named: set[Way] = set()
    for trial in case.trials[1:]:
        color, mark = _INK[trial.way]
        saved = case.saved(trial)
        name = None if trial.way in named else trial.way.value
        named.add(trial.way)
        axes.plot(
            [100 * trial.measured.overhead], [100 * saved.peak_measured], mark, color=color, markersize=7, label=name
        )
        axes.plot(
            [100 * trial.predicted.overhead], [100 * saved.peak_predicted], mark, color=color, markerfacecolor="none"
        )
    dress(axes, across="time over the plain step (%)", upward="memory saved, of the plain peak (%)")
    title = f"Savings against overhead: {experiment.model}, batch {case.batch}"
    write_title(axes, title, "Filled marks are measured, hollow ones predicted; the box is what others published")
    axes.set_ylim(0, 100)
    axes.set_xlim(*_span(experiment))
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


def _box(axes: Axes, experiment: Experiment) -> None:
    published = experiment.published
    if published is None:
        return
    from matplotlib.patches import Rectangle

    corner = (100 * LIMITS[0], 100 * published.low)
    width, height = 100 * (LIMITS[-1] - LIMITS[0]), 100 * (published.high - published.low)
    axes.add_patch(Rectangle(corner, width, height, facecolor=_BOX, edgecolor=_BOX, alpha=0.15, label="published"))


def _span(experiment: Experiment) -> tuple[float, float]:
    """From zero, or from noise below it, to a little beyond the slowest trial; the curve's steep end may leave."""
    trials = experiment.largest.trials
    overheads = [value for trial in trials for value in (trial.measured.overhead, trial.predicted.overhead)]
    return min(-2.0, 105 * min(overheads)), max(45.0, 105 * max(overheads))


def _draw_breakdown(axes: Axes, experiment: Experiment) -> None:
    shown = [item for item in experiment.breakdowns if item.limit in (None, LIMITS[0], LIMITS[-1])]
    scale = choose_scale(max((sum(item.bytes_by_class.values()) for item in shown), default=1))
    names = [label(item).replace(" ≤", "\n≤").replace("per-block ", "per-block\n") for item in shown]
    below = [0.0] * len(shown)
    for kind in MemoryClass:
        heights = [item.bytes_by_class.get(kind.value, 0) / scale.size_bytes for item in shown]
        if any(heights):
            axes.bar(names, heights, bottom=below, width=0.62, color=CLASS_INK[kind].light, label=kind.value)
            below = [start + height for start, height in zip(below, heights, strict=True)]
    dress(axes, across="", upward=f"at the peak ({scale.unit})")
    title = f"What the peak is made of: {experiment.model}, batch {experiment.largest.batch}"
    write_title(axes, title, "Predicted peak by class, plain and in every other way")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


_PICTURES: dict[str, Callable[[Axes, Experiment], None]] = {
    "peak": _draw_peak,
    "time": _draw_time,
    "saved": _draw_saved,
    "breakdown": _draw_breakdown,
}
