"""What a notebook shows of a plan, a profile or a curve: a few words, a small chart and a table, as HTML.

In: the noun. Out: a fragment of a few kilobytes that needs no script and no library; its text takes the notebook's own
colours. The whole report is `write_report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from remat.core.budget import format_bytes
from remat.core.results.pareto import Pareto
from remat.core.results.profile import MemoryClass, StepProfile
from remat.report.contents.gathered import Report, Source, gather
from remat.report.contents.palette import CLASS_INK
from remat.report.contents.samples import sample
from remat.report.contents.summary import format_ns, summarize

_WIDTH, _HEIGHT, _POINTS = 640.0, 110.0, 160
_LIMIT = "#d6453d"


def fragment(source: Source) -> str:
    """One source as HTML."""
    report = gather(source)
    summary = summarize(report)
    parts = [f"<strong>{escape(summary.headline)}</strong>"]
    parts += [_chart(report, title, step) for title, step in report.steps]
    if report.steps:
        parts.append(_legend(report))
    if report.pareto is not None:
        parts.append(_curve_table(report.pareto))
    parts += [
        f"<p style='margin:.3em 0'><b>{escape(answer.title)}.</b> {escape(answer.text)}</p>"
        for answer in summary.answers
    ]
    return f"<div style='max-width:{_WIDTH:.0f}px;font-size:13px;line-height:1.45'>{''.join(parts)}</div>"


def _chart(report: Report, title: str, step: StepProfile) -> str:
    """The classes as stacked areas; all charts of a report have one scale."""
    longest = max(sample(other, _POINTS).starts_ns[-1] for _, other in report.steps) or 1.0
    most = max([other.peak_bytes for _, other in report.steps] + [report.budget_bytes or 1]) * 1.04
    found = sample(step, _POINTS)
    across = [_WIDTH * row.start_ns / longest for row in found.rows] + [_WIDTH * found.starts_ns[-1] / longest]
    base = [0.0] * len(found.rows)
    shapes: list[str] = []
    for kind, line in found.by_class.items():
        top = [below + size * _HEIGHT / most for below, size in zip(base, line, strict=True)]
        shapes.append(f"<path d='{_area(across, base, top)}' fill='{CLASS_INK[kind].light}'/>")
        base = top
    label = f"{title}: peak {format_bytes(step.peak_bytes)}, {format_ns(found.starts_ns[-1])}"
    return (
        f"<div style='margin-top:.5em'>{escape(label)}</div><svg viewBox='0 0 {_WIDTH:.0f} {_HEIGHT:.0f}' role='img' "
        f"aria-label='{escape(label, quote=True)}' style='width:100%;height:auto;display:block' "
        f"preserveAspectRatio='none'>{''.join(shapes)}{_budget(report.budget_bytes, most)}</svg>"
    )


def _area(across: Sequence[float], base: Sequence[float], top: Sequence[float]) -> str:
    """Steps along the top, and back along the base."""

    def steps(heights: Sequence[float]) -> list[tuple[float, float]]:
        pairs = zip(across, across[1:], heights, strict=False)
        return [point for left, right, height in pairs for point in ((left, height), (right, height))]

    outline = [*steps(top), *reversed(steps(base))]
    return "M" + "L".join(f"{x:.1f},{_HEIGHT - y:.1f}" for x, y in outline) + "Z" if outline else ""


def _budget(budget_bytes: int | None, most: float) -> str:
    if budget_bytes is None:
        return ""
    height = _HEIGHT - budget_bytes * _HEIGHT / most
    line = f"d='M0,{height:.1f}H{_WIDTH:.0f}' stroke='{_LIMIT}'"
    return f"<path {line} stroke-width='1.2' stroke-dasharray='6 4' fill='none'/>"


def _legend(report: Report) -> str:
    present = {kind for _, step in report.steps for kind in sample(step, _POINTS).by_class}
    kinds = [kind for kind in MemoryClass if kind in present]
    entries = [f"{_square(CLASS_INK[kind].light)}{kind.value}" for kind in reversed(kinds)]
    if report.budget_bytes is not None:
        entries.append(f"{_square(_LIMIT)}budget {format_bytes(report.budget_bytes)}")
    return f"<div style='margin:.3em 0;opacity:.85'>{'&ensp;'.join(entries)}</div>"


def _square(color: str) -> str:
    return f"<span style='display:inline-block;width:.7em;height:.7em;margin-right:.3em;background:{color}'></span>"


def _curve_table(pareto: Pareto) -> str:
    def row(cells: Iterable[str], tag: str = "td") -> str:
        style = "style='text-align:right;padding:0 .8em'"
        return "<tr>" + "".join(f"<{tag} {style}>{cell}</{tag}>" for cell in cells) + "</tr>"

    rows = [
        row(
            (
                escape(point.solver),
                format_bytes(point.budget_bytes),
                f"{pareto.overhead(point.time_ns):.1%}",
                f"{max(0.0, pareto.overhead(point.bound_ns)):.1%}",
            )
        )
        for point in (*pareto.points, *pareto.baselines)
    ]
    return f"<table>{row(('strategy', 'memory', 'extra time', 'proven bound'), 'th')}{''.join(rows)}</table>"
