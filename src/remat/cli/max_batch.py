"""`remat max-batch`: the largest batch or sequence that trains within a budget, three ways side by side."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.text import Text

from remat.cli.options import (
    BudgetOption,
    DeviceOption,
    JsonOption,
    OffloadOption,
    ScaleOption,
    SeedOption,
    TargetArgument,
    TimeLimitOption,
)
from remat.cli.request import check_request
from remat.cli.subjects import SizeRequest, open_subject
from remat.cli.target import runs_target
from remat.cli.terminal.console import show, show_json
from remat.cli.terminal.progress import parts
from remat.core.results.max_batch import MaxBatch, check_axis
from remat.core.solution import Status
from remat.errors import InfeasibleBudget
from remat.report.tables.max_batch import max_batch_sentence, max_batch_table

AxisOption = Annotated[str, typer.Option("--axis", help="What grows: batch or length.")]
GridOption = Annotated[int, typer.Option("--grid", min=1, help="Look at multiples of this only.")]


def max_batch(
    target: TargetArgument,
    budget: BudgetOption,
    axis: AxisOption = "batch",
    grid: GridOption = 1,
    offload: OffloadOption = None,
    time_limit: TimeLimitOption = 10.0,
    scale: ScaleOption = "tiny",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Find the largest batch or sequence that fits: predicted, then confirmed by one real step."""
    check_request(budget)
    try:
        asked = SizeRequest(budget, axis, grid, time_limit, seed, offload)
        found = _find(target, asked, scale, device)
    except InfeasibleBudget as error:
        if as_json:
            show_json({"status": Status.INFEASIBLE.value, "target": target, "min_budget": error.min_budget})
        raise
    if as_json:
        show_json({**asdict(found), "size": found.size})
    else:
        show(max_batch_table(found), Text(max_batch_sentence(found)))


def _find(target: str, asked: SizeRequest, scale: str, device: str) -> MaxBatch:
    check_axis(asked.axis, asked.grid)
    subject = open_subject(target, scale=scale, device=device, seed=asked.seed)
    with runs_target(target), parts(f"Largest {asked.axis} of {target} within {asked.budget}") as tell:
        return subject.max_batch(replace(asked, tell=lambda what: tell(0, 1, what)))
