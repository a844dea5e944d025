"""What a report was made from: device, torch, budget, solver. Rows of a name and a text, for the end of a page."""

from __future__ import annotations

from remat.core.budget import BudgetScope, format_bytes
from remat.core.results.plan import Plan
from remat.core.results.profile import StepProfile
from remat.report.contents.gathered import Report
from remat.report.tables.text import gap_share

_SHAPES = 4


def details(report: Report) -> tuple[tuple[str, str], ...]:
    rows = [("Step", report.name)]
    step = report.before
    if step is not None:
        rows += _of_step(step)
    elif report.pareto is not None:
        rows.append(("Device", report.pareto.device))
    if report.plan is not None:
        rows += _of_plan(report.plan)
    if report.pareto is not None:
        points, others = len(report.pareto.points), len({point.solver for point in report.pareto.baselines})
        rows.append(("Curve", f"{points} budgets, {others} other strategies"))
    return tuple((name, fact) for name, fact in rows if fact)


def _of_step(step: StepProfile) -> list[tuple[str, str]]:
    origin = "predicted from a plan or from fake tensors" if step.is_estimate else "measured on a real step"
    reserved = f"{format_bytes(step.reserved_bytes)} taken from the device" if step.reserved_bytes else ""
    return [
        ("Device", step.device),
        ("PyTorch", step.torch_version),
        ("Operators", f"{len(step.ops):,}"),
        ("Storages", f"{len(step.storages):,}"),
        ("Allocator", reserved),
        ("Memory", origin),
    ]


def _of_plan(plan: Plan) -> list[tuple[str, str]]:
    shapes = plan.fingerprint.shapes
    more = f" and {len(shapes) - _SHAPES} more" if len(shapes) > _SHAPES else ""
    return [
        ("Budget", f"{format_bytes(plan.budget_bytes)} ({plan.budget_bytes:,} bytes)"),
        ("Plain peak", f"{format_bytes(plan.plain_peak_bytes)} ({plan.plain_peak_bytes:,} bytes)"),
        ("Predicted peak", f"{format_bytes(plan.predicted_peak)} ({plan.predicted_peak:,} bytes)"),
        ("The budget counts", "live bytes" if plan.counts is BudgetScope.LIVE else "the arena"),
        ("Arena", f"{format_bytes(plan.arena_bytes)} ({plan.arena_bytes:,} bytes)" if plan.arena_bytes else ""),
        ("Allocator slack", format_bytes(plan.allocator_slack_bytes) if plan.allocator_slack_bytes else ""),
        ("Smallest known budget", format_bytes(plan.min_budget)),
        ("Solver", plan.solution.solver),
        ("Status", f"{plan.status.value}, gap {gap_share(plan.gap)}"),
        ("Why the solver stopped", plan.solution.reason),
        ("Inputs and parameters", ", ".join(shapes[:_SHAPES]) + more),
    ]
