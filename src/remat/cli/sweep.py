"""`remat solve --sweep N`: every solver at falling budgets, as tables, a curve, a picture or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from remat.cli.terminal.console import log, show, show_json
from remat.cli.terminal.interrupt import Interrupt
from remat.core.budget import format_bytes
from remat.core.problem import Problem, floor_bytes
from remat.core.search.limits import Limits
from remat.core.solution import Status
from remat.report.tables.chart import chart_text, overhead_of, sweep_chart
from remat.report.tables.sweep import sweep_tables

if TYPE_CHECKING:
    from remat.solvers.sweep import Point


def show_sweep(
    problem: Problem,
    solvers: Sequence[str],
    count: int,
    limits: Limits,
    *,
    name: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Solve `count` budgets with each of `solvers`; the whole registry where none is named."""
    from remat.solvers import REGISTRY, get_solver
    from remat.solvers.sweep import plain_peak_bytes, sweep, sweep_budgets

    interrupt = Interrupt()
    chosen = [interrupt.heeded_by(get_solver(solver)) for solver in solvers] or [*map(interrupt.heeded_by, REGISTRY)]
    budgets = sweep_budgets(problem, count)
    base, plain = problem.base_time_ns, plain_peak_bytes(problem)
    points: list[Point] = []
    with interrupt.caught(log):
        for point in sweep(problem, chosen, budgets, limits):
            points.append(point)
            log(_line(point, base))
            if interrupt.asked:
                break
    chart = sweep_chart(points, base, name)
    if as_json:
        show_json(_facts(problem, name, plain, points))
    else:
        show(*sweep_tables(points, base, plain, name), Text(chart_text(chart, with_others=False)))
    if output is not None:
        from remat.report.pictures.curve import draw_curve

        log(f"Wrote {draw_curve(output, chart)}")


def _line(point: Point, base_time: float) -> str:
    overhead = overhead_of(point, base_time)
    found = "nothing that fits" if overhead is None else f"{overhead:+.2%}"
    return f"{format_bytes(point.budget_bytes)}, {point.solver}: {found}, {point.seconds:.1f} s"


def _facts(problem: Problem, name: str, plain_peak_bytes: int, points: Sequence[Point]) -> dict[str, object]:
    return {
        "name": name,
        "ops": len(problem.graph.ops),
        "base_time": problem.base_time_ns,
        "plain_peak": plain_peak_bytes,
        "floor": floor_bytes(problem)[0],
        "points": [_point_facts(point, problem.base_time_ns) for point in points],
    }


def _point_facts(point: Point, base_time: float) -> dict[str, object]:
    """The fields of a single solve, without the schedule; null where there is none."""
    found = point.solution
    return {
        "budget": point.budget_bytes,
        "solver": point.solver,
        "status": found.status.value if found else Status.INFEASIBLE.value,
        "time": found.time_ns if found else None,
        "overhead": overhead_of(point, base_time),
        "bound": found.bound_ns if found else None,
        "gap": found.gap if found else None,
        "peak": found.peak_bytes if found else None,
        "seconds": point.seconds,
        "reason": found.reason if found else point.reason,
    }
