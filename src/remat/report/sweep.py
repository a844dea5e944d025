"""Solvers side by side at falling budgets: tables, and a curve in plain characters.

In: the points of a sweep. Out: `rich` tables that are no wider than a terminal, or lines of text. The *lead* is the
solver whose bound, gap and seconds are shown: `auto` where it took part, else the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.report.text import gap_share

if TYPE_CHECKING:
    from remat.solvers.sweep import Point

_ABREAST = 6
"""Solvers in one table."""
_NOTHING = "–"
_MARK, _BOUND = "o", "·"


def lead_of(points: Sequence[Point]) -> str:
    names = [point.solver for point in points]
    return "auto" if "auto" in names else next(iter(names), "")


def overhead_of(point: Point, base_time: float) -> float | None:
    return None if point.solution is None else _over(point.solution.time_ns, base_time)


def bound_of(point: Point, base_time: float) -> float | None:
    return None if point.solution is None else _over(point.solution.bound_ns, base_time)


def sweep_tables(points: Sequence[Point], base_time: float, plain_peak_bytes: int, title: str) -> list[Table]:
    """The lead with what it proved, then the other solvers, a few to a table."""
    lead = lead_of(points)
    others = list(dict.fromkeys(point.solver for point in points if point.solver != lead))
    rows = {(point.budget_bytes, point.solver): point for point in points}
    budgets = list(dict.fromkeys(point.budget_bytes for point in points))
    tables = [_lead_table(rows, budgets, lead, base_time, plain_peak_bytes, title)]
    for start in range(0, len(others), _ABREAST):
        columns = others[start : start + _ABREAST]
        table = _table("", columns)
        for budget in budgets:
            cells = [_percent(_overhead(rows.get((budget, name)), base_time)) for name in columns]
            table.add_row(*_budget(budget, plain_peak_bytes), *cells)
        tables.append(table)
    return tables


def _lead_table(
    rows: dict[tuple[int, str], Point], budgets: list[int], lead: str, base_time: float, plain: int, title: str
) -> Table:
    table = _table(title, [lead, "bound", "gap", "seconds"])
    for budget in budgets:
        point = rows.get((budget, lead))
        solution = None if point is None else point.solution
        table.add_row(
            *_budget(budget, plain),
            f"[bold]{_percent(_overhead(point, base_time))}[/]",
            _percent(None if point is None else bound_of(point, base_time)),
            _NOTHING if solution is None else gap_share(solution.gap),
            _NOTHING if point is None else f"{point.seconds:.1f}",
        )
    return table


def sweep_curve(points: Sequence[Point], base_time: float, width: int = 64, height: int = 13) -> str:
    """Overhead of the lead (o) and its proven bound (·) against the budget, largest budget on the left."""
    lead = lead_of(points)
    shown = [point for point in points if point.solver == lead and point.solution is not None]
    if not shown:
        return ""
    left, right = shown[0].budget_bytes, shown[-1].budget_bytes
    top = max(max(_over(point.solution.time_ns, base_time) for point in shown if point.solution is not None), 1e-9)
    grid = [[" "] * width for _ in range(height)]
    for point in shown:
        column = round((left - point.budget_bytes) / max(1, left - right) * (width - 1))
        for value, mark in ((bound_of(point, base_time), _BOUND), (overhead_of(point, base_time), _MARK)):
            if value is not None:
                grid[height - 1 - round(value / top * (height - 1))][column] = mark
    lines = [f"{_axis(row, height, top):>9} │{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    ends = f"{format_bytes(left)}{format_bytes(right):>{width - len(format_bytes(left))}}"
    legend = f"{_MARK} {lead}: time over plain   {_BOUND} proven bound (hidden where equal)   budget falls to the right"
    return "\n".join([*lines, f"{'':>9} └{'─' * width}", f"{'':>11}{ends}", f"{'':>11}{legend}"])


def _axis(row: int, height: int, top: float) -> str:
    return f"{top * (height - 1 - row) / (height - 1):.1%}" if row % 4 == 0 else ""


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("budget", justify="right", no_wrap=True)
    table.add_column("share", justify="right", style="dim", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _budget(budget_bytes: int, plain_peak_bytes: int) -> tuple[str, str]:
    return format_bytes(budget_bytes), f"{budget_bytes / max(1, plain_peak_bytes):.3f}x"


def _overhead(point: Point | None, base_time: float) -> float | None:
    return None if point is None else overhead_of(point, base_time)


def _over(time_ns: float, base_time: float) -> float:
    return time_ns / base_time - 1 if base_time > 0 else 0.0


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.2%}"
