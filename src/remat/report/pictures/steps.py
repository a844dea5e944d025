"""A picture of a report for a paper: memory stacked by class, before and after on one scale, and the curve below.

In: a `Report`. Out: a PNG or SVG file, by its suffix. Frame, scales and colours are those of the other pictures and of
the page; the strip under each step shows its phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.budget import format_bytes
from remat.core.results.profile import MemoryClass
from remat.report.contents.gathered import Report
from remat.report.contents.palette import CLASS_INK, PHASE_INK
from remat.report.contents.samples import PhaseRun, Samples, phases, sample
from remat.report.contents.summary import format_ns, summarize
from remat.report.pictures.frontier import plot_pareto
from remat.report.pictures.picture import INK, LIMIT, MUTED, Scale, choose_scale, dress, open_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GHOST = "#6b7785"
_TIMES = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_TOP, _STEP, _CURVE, _GAP, _BOTTOM = 1.05, 2.0, 2.9, 0.62, 0.62
"""Heights in inches."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A step as it is drawn."""

    title: str
    samples: Samples
    runs: tuple[PhaseRun, ...]

    @property
    def end_ns(self) -> float:
        return self.samples.starts_ns[-1]

    @property
    def heights(self) -> list[int]:
        return [sum(parts) for parts in zip(*self.samples.by_class.values(), strict=True)]


def draw_report(report: Report, path: Path) -> Path:
    """Draw the steps one above the other, and the curve under them."""
    steps = [_Drawn(title, sample(step), phases(step)) for title, step in report.steps]
    heights = [_STEP] * len(steps) + ([_CURVE] if report.pareto is not None else [])
    figure = open_figure(path, height=_TOP + sum(heights) + _GAP * (len(heights) - 1) + _BOTTOM)
    panels = _panels(figure, heights)
    for number, drawn in enumerate(steps):
        _draw_step(panels[number], report, steps, number)
        last = number == len(steps) - 1
        panels[number].tick_params(labelbottom=last, pad=9)
        label = f"{drawn.title}: peak {format_bytes(max(drawn.heights, default=0))}, {format_ns(drawn.end_ns)}"
        panels[number].set_title(label, loc="left", fontsize=10.5, fontweight="bold", color=MUTED, pad=5)
    if report.pareto is not None:
        plot_pareto(panels[-1], report.pareto)
    _write_head(figure, summarize(report).headline, steps)
    return save_picture(panels[0], path)


def _panels(figure: Figure, heights: list[float]) -> list[Axes]:
    total = figure.get_figheight()
    edge = total - _TOP
    found: list[Axes] = []
    for height in heights:
        found.append(figure.add_axes((0.08, (edge - height) / total, 0.9, height / total)))
        edge -= height + _GAP
    return found


def _draw_step(axes: Axes, report: Report, steps: list[_Drawn], number: int) -> None:
    most = max([max(drawn.heights, default=0) for drawn in steps] + [report.budget_bytes or 1])
    scale, longest = choose_scale(most), max(drawn.end_ns for drawn in steps) or 1.0
    unit, unit_ns = next((found for found in _TIMES if longest >= found[1]), _TIMES[-1])
    axes.set_xlim(0, longest / unit_ns)
    axes.set_ylim(0, 1.1 * most / scale.size_bytes)
    _draw_classes(axes, steps[number].samples, scale, unit_ns)
    for run in steps[number].runs:
        edges = [run.start_ns / longest, run.end_ns / longest]
        color = PHASE_INK[run.phase].light
        axes.fill_between(edges, -0.05, -0.015, color=color, lw=0, transform=axes.transAxes, clip_on=False)
    if number:
        plain = steps[0]
        across = [row.start_ns / unit_ns for row in plain.samples.rows]
        line = [height / scale.size_bytes for height in plain.heights]
        axes.plot(across, line, drawstyle="steps-post", color=_GHOST, linewidth=0.9, linestyle=(0, (1, 1.5)))
    if report.budget_bytes is not None:
        _draw_budget(axes, report.budget_bytes, scale, longest / unit_ns)
    dress(axes, across=f"time ({unit})" if number == len(steps) - 1 else "", upward=f"memory ({scale.unit})")


def _draw_classes(axes: Axes, found: Samples, scale: Scale, unit_ns: float) -> None:
    if not found.by_class:
        return
    across = [row.start_ns / unit_ns for row in found.rows] + [found.starts_ns[-1] / unit_ns]
    lines = [[size / scale.size_bytes for size in (*line, line[-1])] for line in found.by_class.values()]
    colors = [CLASS_INK[kind].light for kind in found.by_class]
    axes.stackplot(across, lines, colors=colors, step="post", linewidth=0)


def _draw_budget(axes: Axes, budget_bytes: int, scale: Scale, end: float) -> None:
    height = budget_bytes / scale.size_bytes
    axes.axhline(height, color=LIMIT, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}",
        (end, height),
        xytext=(-3, 3),
        textcoords="offset points",
        horizontalalignment="right",
        color=LIMIT,
        fontsize=8.5,
    )


def _write_head(figure: Figure, headline: str, steps: list[_Drawn]) -> None:
    from matplotlib.patches import Patch

    height = figure.get_figheight()
    figure.text(0.08, 1 - 0.32 / height, headline, fontsize=14, fontweight="bold", color=INK, va="center")
    kinds = [kind for kind in MemoryClass if any(kind in drawn.samples.by_class for drawn in steps)]
    patches = [Patch(color=CLASS_INK[kind].light, label=kind.value) for kind in reversed(kinds)]
    ran = dict.fromkeys(run.phase for drawn in steps for run in drawn.runs)
    patches += [Patch(color=PHASE_INK[phase].light, label=phase.value) for phase in ran]
    if patches:
        figure.legend(
            handles=patches,
            loc="center left",
            bbox_to_anchor=(0.072, 1 - 0.6 / height),
            ncols=len(patches),
            frameon=False,
            fontsize=8,
            handlelength=1.0,
            columnspacing=1.2,
            labelcolor=MUTED,
        )
