"""A Pareto curve as tables: the best known schedule at each budget, and the other strategies beside it.

In: a `Pareto`. Out: `rich` tables that are no wider than a terminal.
"""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from remat.core.budget import format_bytes
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.report.tables.text import gap_share

_NOTHING = "–"


def pareto_tables(pareto: Pareto) -> list[Table]:
    """The curve with what is proven and measured, then the other strategies."""
    title = f"{pareto.name} on {pareto.device}: plain peak {format_bytes(pareto.plain_peak_bytes)}, "
    title += f"{pareto.base_time_ns / 1e6:.1f} ms in its ops; nothing fits below {format_bytes(pareto.floor_bytes)}"
    tables = [_curve_table(pareto, title)]
    if pareto.baselines:
        tables.append(_baseline_table(pareto))
    return tables


def _curve_table(pareto: Pareto, title: str) -> Table:
    was_run = any(point.measured_ratio is not None for point in pareto.points)
    table = _table(title, ["budget", "share", "peak", "time over plain", "bound", "gap"])
    for name in ("measured peak", "measured time") if was_run else ():
        table.add_column(name, justify="right", no_wrap=True)
    for point in pareto.points:
        row = [
            *_budget(pareto, point),
            format_bytes(point.peak_bytes),
            f"[bold]{pareto.overhead(point.time_ns):.2%}[/]",
            f"{pareto.overhead(point.bound_ns):.2%}",
            gap_share(point.gap),
        ]
        table.add_row(*row, *(_measured(point) if was_run else ()))
    return table


def _baseline_table(pareto: Pareto) -> Table:
    table = _table(
        "the same step by other strategies", ["strategy", "peak", "share", "time over plain", "best known there"]
    )
    was_run = any(point.measured_ratio is not None for point in pareto.baselines)
    for name in ("measured peak", "measured time") if was_run else ():
        table.add_column(name, justify="right", no_wrap=True)
    for point in shown_baselines(pareto):
        best = best_within(pareto, point.peak_bytes)
        row = [
            point.solver,
            format_bytes(point.peak_bytes),
            f"{point.peak_bytes / max(1, pareto.plain_peak_bytes):.3f}x",
            f"{pareto.overhead(point.time_ns):.2%}",
            _NOTHING if best is None else f"{pareto.overhead(best.time_ns):.2%}",
        ]
        table.add_row(*row, *(_measured(point) if was_run else ()))
    return table


def shown_baselines(pareto: Pareto) -> list[ParetoPoint]:
    """Of each strategy, the points that are not bettered by another of its own."""
    shown: list[ParetoPoint] = []
    for point in sorted(pareto.baselines, key=lambda item: (-item.peak_bytes, item.time_ns)):
        own = [other for other in pareto.baselines if other.solver == point.solver and other is not point]
        worse = any(_betters(other, point) for other in own)
        again = any((other.peak_bytes, other.solver) == (point.peak_bytes, point.solver) for other in shown)
        if not worse and not again:
            shown.append(point)
    order = list(dict.fromkeys(point.solver for point in pareto.baselines))
    return sorted(shown, key=lambda point: (order.index(point.solver), -point.peak_bytes))


def best_within(pareto: Pareto, peak_bytes: int) -> ParetoPoint | None:
    """The fastest that is known to need no more than `peak_bytes`."""
    fitting = [point for point in (*pareto.points, *pareto.baselines) if point.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda point: point.time_ns, default=None)


def _betters(one: ParetoPoint, other: ParetoPoint) -> bool:
    no_worse = one.peak_bytes <= other.peak_bytes and one.time_ns <= other.time_ns
    return no_worse and (one.peak_bytes, one.time_ns) != (other.peak_bytes, other.time_ns)


def _budget(pareto: Pareto, point: ParetoPoint) -> tuple[str, str]:
    return format_bytes(point.budget_bytes), f"{point.budget_bytes / max(1, pareto.plain_peak_bytes):.3f}x"


def _measured(point: ParetoPoint) -> tuple[str, str]:
    if point.measured_peak_bytes is None or point.measured_ratio is None:
        return _NOTHING, _NOTHING
    return format_bytes(point.measured_peak_bytes), f"{point.measured_ratio:.2f}x"


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if name == "strategy" else "right", no_wrap=number == 0)
    return table
