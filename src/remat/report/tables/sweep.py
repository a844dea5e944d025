"""Solvers side by side at falling budgets, as tables.

In: the points of a sweep. Out: `rich` tables that are no wider than a terminal. The *lead* is the solver whose bound,
gap and seconds are shown: `auto` where it took part, else the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.report.tables.chart import bound_of, lead_of, overhead_of
from remat.report.tables.text import gap_share

if TYPE_CHECKING:
    from remat.solvers.sweep import Point

_ABREAST = 6
"""Solvers in one table."""
_NOTHING = "–"


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


def _percent(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.2%}"
