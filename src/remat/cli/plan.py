"""`remat plan`: a model and a budget in, the schedule that would train it out, without running the model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from remat.cli.options import (
    BudgetOption,
    DeviceOption,
    JsonOption,
    OffloadOption,
    ScaleOption,
    SeedOption,
    SolverOption,
    TargetArgument,
    TimeLimitOption,
)
from remat.cli.request import check_folder, check_ranks, check_report, check_request
from remat.cli.subjects import PlanRequest, TargetSubject, open_subject
from remat.cli.target import runs_target
from remat.cli.terminal.console import log, show, show_json, working
from remat.core.budget import BudgetScope, format_bytes
from remat.core.solution import Status
from remat.errors import InfeasibleBudget
from remat.report.tables.text import plan_table

if TYPE_CHECKING:
    from remat.core.results.plan import Plan
    from remat.distributed.pipelines.pretended import PretendedStage

OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the plan to this JSON file.", show_default=False)
]
ExplainOption = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="MODULE",
        help='What is kept and recomputed in this module, as layers.3; "" is the whole model.',
        show_default=False,
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a report: .html, .png, .svg, .json, .trace.json (Perfetto) or .pickle (memory_viz).",
        show_default=False,
    ),
]
CountOption = Annotated[
    BudgetScope, typer.Option("--count", help="What the budget bounds: live bytes, or the height of their arena.")
]
CompilerOption = Annotated[
    str | None,
    typer.Option("--compiler", help='"inductor" plans the code of torch.compile; eager kernels if left out.'),
]
WorldOption = Annotated[
    int | None,
    typer.Option("--world", help="Plan for rank 0 of so many ranks, which need not be here.", show_default=False),
]
ParallelOption = Annotated[
    str,
    typer.Option(
        "--parallel", help="How they train together: ddp, zero1, fsdp, fsdp:keep (no reshard), or pp:4 for four stages."
    ),
]
BandwidthOption = Annotated[float, typer.Option("--bandwidth", help="Between ranks, in GB/s of one direction.")]
LatencyOption = Annotated[float, typer.Option("--latency", help="Between ranks, in microseconds.")]
CompareOption = Annotated[bool, typer.Option("--compare", help="Other strategies on the same problem.")]


def plan(
    target: TargetArgument,
    budget: BudgetOption,
    solver: SolverOption = "auto",
    time_limit: TimeLimitOption = 60.0,
    count: CountOption = BudgetScope.LIVE,
    compiler: CompilerOption = None,
    offload: OffloadOption = None,
    output: OutputOption = None,
    report: ReportOption = None,
    explain: ExplainOption = None,
    compare: CompareOption = False,
    world: WorldOption = None,
    parallel: ParallelOption = "ddp",
    bandwidth: BandwidthOption = 100.0,
    latency: LatencyOption = 10.0,
    scale: ScaleOption = "tiny",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan a training step under a budget, without running it, or for ranks that are not here."""
    check_request(budget, solver)
    check_folder(output)
    check_report(report)
    check_ranks(world, parallel, bandwidth, latency)
    subject = open_subject(target, scale=scale, device=device, seed=seed)
    asked = PlanRequest(budget, solver, time_limit, seed, count, compiler, offload)
    try:
        with working(f"Planning {target} under {budget}"), runs_target(target):
            made, ranks = _made(subject, asked, world, parallel, bandwidth, latency)
    except InfeasibleBudget as error:
        if as_json:
            show_json({"status": Status.INFEASIBLE.value, "target": target, "min_budget": error.min_budget})
        raise
    if as_json:
        show_json({**_facts(target, made, explain, compare), **ranks})
    else:
        show(*_tables(target, made, explain, compare), *_ranks_line(ranks))
    if output is not None:
        made.save(output)
        log(f"Wrote {output}")
    if report is not None:
        from remat.report import write_report

        log(f"Wrote {write_report(report, made, name=target)}")


def _made(
    subject: TargetSubject, asked: PlanRequest, world: int | None, parallel: str, bandwidth: float, latency: float
) -> tuple[Plan, dict[str, Any]]:
    """The plan and, where it is for one of several ranks, what is known of them."""
    if world is None:
        return subject.plan(asked), {}
    from remat.pytorch.costs.collective_costs import RankLink

    found = subject.plan_for_ranks(asked, parallel, world)
    seconds = found.traffic.seconds(RankLink(bandwidth * 1e9, latency * 1e-6), world)
    ranks = {"world": world, "parallel": parallel, "collectives": found.traffic.calls, "communication_s": seconds}
    stages = {"stages": [_stage_facts(stage) for stage in found.stages]} if found.stages else {}
    return found.plan, {**ranks, "bandwidth_gb_per_s": bandwidth, "latency_us": latency, **stages}


def _stage_facts(stage: PretendedStage) -> dict[str, Any]:
    plan = stage.plan
    return {
        "in_flight": stage.in_flight,
        "plain_peak": plan.plain_peak_bytes,
        "budget": plan.budget_bytes,
        "predicted_peak": plan.predicted_peak,
        "overhead": plan.overhead,
    }


def _ranks_line(ranks: dict[str, Any]) -> list[RenderableType]:
    if not ranks:
        return []
    return [
        Text(
            f"Rank 0 of {ranks['world']} under {ranks['parallel']}: {ranks['collectives']} collectives a step take "
            f"{1e3 * ranks['communication_s']:.2f} ms one after the other, at {ranks['bandwidth_gb_per_s']:g} GB/s "
            f"and {ranks['latency_us']:g} µs.\n"
        ),
        *(
            Text(
                f"Stage {number}: {stage['in_flight']} micro-batches in flight, "
                f"{format_bytes(stage['predicted_peak'])} of {format_bytes(stage['budget'])}, plainly "
                f"{format_bytes(stage['plain_peak'])}; {100 * stage['overhead']:.1f} % is computed again."
            )
            for number, stage in enumerate(ranks.get("stages", ()))
        ),
    ]


def _tables(target: str, made: Plan, explain: str | None, compare: bool) -> list[RenderableType]:
    tables: list[RenderableType] = [plan_table(made, target)]
    if explain is not None:
        tables.append(Text(str(made.explain(explain)) + "\n"))
    if compare:
        tables.append(Text(str(made.compare()) + "\n"))
    return tables


def _facts(target: str, made: Plan, explain: str | None, compare: bool) -> dict[str, object]:
    facts: dict[str, Any] = {
        "target": target,
        "status": made.status.value,
        "solver": made.solution.solver,
        "budget": made.budget_bytes,
        "counts": made.counts.value,
        "plain_peak": made.plain_peak_bytes,
        "predicted_peak": made.predicted_peak,
        "arena": made.arena_bytes,
        "min_budget": made.min_budget,
        "overhead": made.overhead,
        "time_ns": made.solution.time_ns,
        "base_time_ns": made.plain_time_ns,
        "bound_ns": made.bound,
        "gap": made.gap,
        "breakdown": dict(made.breakdown_bytes),
        "offload": made.offload,
    }
    if explain is not None:
        facts["explanation"] = [asdict(row) for row in made.explain(explain).rows]
    if compare:
        facts["comparison"] = [{**asdict(row), "status": row.status.value} for row in made.compare().rows]
    return facts
