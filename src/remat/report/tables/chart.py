"""Time over the plain step against memory, as lines to be drawn: on a terminal here, as a picture in `curve`.

In: a Pareto curve or the points of a sweep. Out: a `Chart`, and lines of text that show one. The *lead* is the line
whose proven bound is shown: `auto` where it took part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING

from remat.core.budget import format_bytes
from remat.core.results.pareto import Pareto, ParetoPoint

if TYPE_CHECKING:
    from remat.solvers.sweep import Point

_MARK, _BOUND = "o", "·"
_LETTERS = ascii_lowercase.replace(_MARK, "")
_HEADROOM = 1.6
"""Others that are slower than the lead's slowest by more than this leave the chart at the top."""


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy: its time over the plain step's, as a share, at each budget."""

    name: str
    budgets: tuple[int, ...]
    overheads: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    lead: Line
    bounds: tuple[float, ...]
    """Proven for each budget of the lead, as a share over the plain step's time."""
    others: tuple[Line, ...] = ()
    measured: Line | None = None
    """What the lead's points took when they really ran."""

    @property
    def top(self) -> float:
        """The largest overhead that is shown."""
        return max((*self.lead.overheads, 1e-3))


def pareto_chart(pareto: Pareto) -> Chart:
    """The curve, and each baseline as a line of its own; one that knows no budget is one point."""
    names = dict.fromkeys(point.solver for point in pareto.baselines)
    return Chart(
        name=pareto.name,
        lead=_line(pareto, "auto", pareto.points),
        bounds=tuple(pareto.overhead(point.bound_ns) for point in pareto.points),
        others=tuple(_line(pareto, name, [p for p in pareto.baselines if p.solver == name]) for name in names),
        measured=_measured(pareto),
    )


def _line(pareto: Pareto, name: str, points: Sequence[ParetoPoint]) -> Line:
    own = points[0].solver if points else name
    return Line(
        own, tuple(point.budget_bytes for point in points), tuple(pareto.overhead(point.time_ns) for point in points)
    )


def _measured(pareto: Pareto) -> Line | None:
    run = [
        (point.budget_bytes, point.measured_ratio - 1) for point in pareto.points if point.measured_ratio is not None
    ]
    return Line("measured", tuple(budget for budget, _ in run), tuple(over for _, over in run)) if run else None


def sweep_chart(points: Sequence[Point], base_time: float, name: str) -> Chart:
    """Solvers at the budgets that they fit."""
    lead = lead_of(points)
    fitting = {
        solver: [point for point in points if point.solver == solver and point.solution is not None]
        for solver in dict.fromkeys(point.solver for point in points)
    }

    def line(solver: str) -> Line:
        found = fitting.get(solver, [])
        times = (overhead_of(point, base_time) or 0.0 for point in found)
        return Line(solver, tuple(point.budget_bytes for point in found), tuple(times))

    bounds = tuple(bound_of(point, base_time) or 0.0 for point in fitting.get(lead, []))
    return Chart(name, line(lead), bounds, tuple(line(solver) for solver in fitting if solver != lead))


def lead_of(points: Sequence[Point]) -> str:
    names = [point.solver for point in points]
    return "auto" if "auto" in names else next(iter(names), "")


def overhead_of(point: Point, base_time: float) -> float | None:
    return None if point.solution is None else _over(point.solution.time_ns, base_time)


def bound_of(point: Point, base_time: float) -> float | None:
    return None if point.solution is None else _over(point.solution.bound_ns, base_time)


def _over(time_ns: float, base_time: float) -> float:
    return time_ns / base_time - 1 if base_time > 0 else 0.0


def chart_text(chart: Chart, *, width: int = 64, height: int = 13, with_others: bool = True) -> str:
    """The lead (o) and its proven bound (·) against the budget, largest on the left; other strategies as letters."""
    if not chart.lead.budgets:
        return ""
    left, right = chart.lead.budgets[0], chart.lead.budgets[-1]
    others = chart.others if with_others else ()
    slowest = max((over for line in others for over in line.overheads), default=0.0)
    top = max(chart.top, min(_HEADROOM * chart.top, slowest))
    grid = [[" "] * width for _ in range(height)]
    for budget, over, mark in _marks(chart, others):
        column = round((left - budget) / max(1, left - right) * (width - 1))
        row = height - 1 - round(over / top * (height - 1))
        if 0 <= column < width and 0 <= row < height:
            grid[row][column] = mark
    lines = [f"{_axis(row, height, top):>9} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    ends = f"{format_bytes(left)}{format_bytes(right):>{width - len(format_bytes(left))}}"
    names = ", ".join(f"{letter} {line.name}" for letter, line in zip(_LETTERS, others, strict=False))
    legend = f"{_MARK} {chart.lead.name}: time over plain   {_BOUND} proven bound (hidden where equal)   budget falls →"
    return "\n".join(
        [
            *lines,
            f"{'':>9} └{'─' * width}",
            f"{'':>11}{ends}",
            f"{'':>11}{legend}",
            *([f"{'':>11}{names}"] if names else []),
        ]
    )


def _marks(chart: Chart, others: Sequence[Line]) -> Iterator[tuple[int, float, str]]:
    """Budget, overhead and mark; later ones cover earlier ones."""
    for letter, line in zip(_LETTERS, others, strict=False):
        yield from ((budget, over, letter) for budget, over in zip(line.budgets, line.overheads, strict=True))
    yield from ((budget, bound, _BOUND) for budget, bound in zip(chart.lead.budgets, chart.bounds, strict=True))
    yield from ((budget, over, _MARK) for budget, over in zip(chart.lead.budgets, chart.lead.overheads, strict=True))


def _axis(row: int, height: int, top: float) -> str:
    return f"{top * (height - 1 - row) / (height - 1):.1%}" if row % 4 == 0 else ""
