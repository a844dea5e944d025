"""Plans, solutions and trainings as tables for a terminal.

In: the noun. Out: a `rich` renderable, which prints plainly where the output is not a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from remat.core.budget import BudgetScope, format_bytes
from remat.core.copies import copies_of
from remat.core.engines import follow_copies
from remat.core.problem import Problem
from remat.core.results.plan import Plan
from remat.core.solution import Solution, Status
from remat.report.tables.training import TrainingComparison

if TYPE_CHECKING:
    from remat.layout import LayoutProblem, Placement

_COUNTED = {BudgetScope.LIVE: "live bytes", BudgetScope.ARENA: "the arena"}
_STATUS_STYLE = {Status.OPTIMAL: "green", Status.FEASIBLE: "yellow", Status.INFEASIBLE: "red"}


def plan_table(plan: Plan, title: str = "plan") -> Table:
    """What was asked, what the plan promises, and what is proven about it."""
    share = plan.budget_bytes / plan.plain_peak_bytes if plan.plain_peak_bytes else 0.0
    base = plan.plain_time_ns
    rows = [
        ("status", _status(plan.status)),
        ("solver", plan.solution.solver),
        ("plain peak", format_bytes(plan.plain_peak_bytes)),
        ("budget", f"{format_bytes(plan.budget_bytes)} ({share:.2f}x), counts {_COUNTED[plan.counts]}"),
        ("predicted peak", format_bytes(plan.predicted_peak)),
        *([] if plan.arena_bytes is None else [("arena", format_bytes(plan.arena_bytes))]),
        ("plain step", f"{base / 1e6:.3f} ms in its ops"),
        ("planned step", f"{plan.solution.time_ns / 1e6:.3f} ms, {plan.overhead:.2%} more"),
        ("bound", f"{plan.bound / 1e6:.3f} ms: no schedule within the budget is faster"),
        ("gap", f"at most {gap_share(plan.gap)} from the fastest"),
        *_offloaded(plan),
        *((f"resident: {name}", format_bytes(count)) for name, count in plan.breakdown_bytes),
    ]
    return _facts(title, rows)


def _offloaded(plan: Plan) -> list[tuple[str, str]]:
    """What spends a while on the host, where anything does."""
    if not plan.offload or plan.schedule is None:
        return []
    if plan.compiled is not None:
        return [("offloaded", f"to {plan.offload}")]
    times, moved = follow_copies(plan.problem, plan.schedule), copies_of(plan.problem.graph)
    size, most = sum(plan.problem.costs.size_bytes[value] for value in moved), times.host_peak_bytes
    what = f"{len(moved)} values, {format_bytes(size)}, at most {format_bytes(most)} at once"
    return [("offloaded", f"{what}, to {plan.offload}"), ("waits for copies", f"{times.waited_ns / 1e6:.3f} ms")]


def solution_table(problem: Problem, solution: Solution, seconds: float, title: str = "instance") -> Table:
    """A solved instance file; its times have the file's own unit."""
    base = problem.base_time_ns
    overhead = solution.time_ns / base - 1 if base > 0 else 0.0
    steps = len(solution.schedule.steps) if solution.schedule is not None else 0
    rows = [
        ("status", _status(solution.status)),
        ("solver", solution.solver),
        ("budget", format_bytes(problem.budget_bytes)),
        ("peak", format_bytes(solution.peak_bytes)),
        ("smallest known budget", format_bytes(solution.min_budget_bytes)),
        ("time", f"{amount(solution.time_ns)} ({overhead:+.2%} over {amount(base)})"),
        ("bound", amount(solution.bound_ns)),
        ("gap", gap_share(solution.gap)),
        ("steps", f"{steps} for {len(problem.graph.ops)} ops"),
        ("solved in", f"{seconds:.2f} s"),
    ]
    return _facts(problem.graph.name or title, rows)


def layout_table(problem: LayoutProblem, placement: Placement, load: int, seconds: float, title: str) -> Table:
    """Addresses for the buffers of a file; their sizes have the file's own unit."""
    over = placement.height / load - 1 if load else 0.0
    rows = [
        ("status", f"[{'green' if placement.height == placement.bound else 'yellow'}]{placement.status.value}[/]"),
        ("solver", placement.solver),
        ("buffers", str(len(problem.buffers))),
        ("capacity", "none" if problem.capacity is None else str(problem.capacity)),
        ("height", str(placement.height)),
        ("load", f"{load}: the most alive at one time; the height is {over:.2%} above it"),
        ("bound", f"{placement.bound}: no placement is lower"),
        ("all buffers", f"{sum(buffer.size for buffer in problem.buffers)}: what they would take apart"),
        ("solved in", f"{seconds:.2f} s"),
    ]
    return _facts(title, rows)


def training_table(run: TrainingComparison) -> Table:
    """Plain training beside training under the budget."""
    table = Table(title=f"{run.model} on {run.device}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("plain", justify="right")
    table.add_column("remat", justify="right", style="bold")
    table.add_column("")
    for step, (plain, planned) in enumerate(zip(run.plain_losses, run.planned_losses, strict=True), start=1):
        table.add_row(f"loss, step {step}", f"{plain:.6f}", f"{planned:.6f}", _same(plain, planned))
    fits = "[green]within budget[/]" if run.within_budget else "[red]over budget[/]"
    share = run.measured_peak_bytes / run.plain_peak_bytes if run.plain_peak_bytes else 0.0
    table.add_row("budget", "", format_bytes(run.budget_bytes), "")
    table.add_row(
        "predicted peak", "", format_bytes(run.predicted_peak_bytes), f"{run.prediction_error:+.2%} from measured"
    )
    measured = (format_bytes(run.plain_peak_bytes), format_bytes(run.measured_peak_bytes))
    table.add_row("measured peak", *measured, f"{share:.2f}x, {fits}")
    table.add_row(
        "step time", _milliseconds(run.plain_seconds), _milliseconds(run.planned_seconds), f"{run.time_ratio:.2f}x"
    )
    table.add_row("planning, once", "", f"{run.planning_seconds:.1f} s", "")
    table.add_row("solver", "", run.solver, run.status)
    table.add_row("proven gap", "", gap_share(run.gap), "to the fastest schedule")
    return table


def gap_share(share: float) -> str:
    """Two digits, and never a zero that is not one."""
    return "below 0.01%" if 0 < share < 5e-5 else f"{share:.2%}"


def amount(time: float) -> str:
    return f"{time:,.0f}" if time >= 1000 else f"{time:g}"


def _same(plain: float, planned: float) -> str:
    return "[green]equal[/]" if plain == planned else "[red]differ[/]"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _status(status: Status) -> str:
    return f"[{_STATUS_STYLE[status]}]{status.value}[/]"


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    # A file's name for itself may look like markup.
    table = Table(title=Text(title), box=box.SIMPLE, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="dim")
    table.add_column()
    for name, fact in rows:
        table.add_row(name, fact)
    return table
