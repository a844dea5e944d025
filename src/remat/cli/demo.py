"""`remat demo`: train a transformer and a ResNet plainly and under half the memory, and compare."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from remat.cli.options import DeviceOption, JsonOption, SeedOption
from remat.cli.request import check_request, check_scale
from remat.cli.target import choose_device
from remat.cli.terminal.console import show, show_json, working
from remat.cli.training import Compared, Make, Trainee, compare_training
from remat.errors import MissingExtra, VerificationError
from remat.report import write_report
from remat.report.pictures.picture import draw_memory, prepare_folder
from remat.report.tables.text import training_table
from remat.zoo import SMALL_IMAGES, build

MODELS = ("gpt", "resnet18")
HALF = "0.5x"
LONGEST_STEP_S = 2.0
"""Batches are halved until a plain step takes no longer, so that a slow machine shows the same in a few minutes."""
SMALLEST_BATCH = 4

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures and reports.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to train.")]
DemoBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help="Budget of the second training; by default half of the first, or the least that fits.",
    ),
]
DemoScaleOption = Annotated[str, typer.Option("--scale", help="Size of the models: tiny or demo.")]


def demo(
    output: OutputOption = Path("remat-demo"),
    steps: StepsOption = 3,
    device: DeviceOption = "auto",
    budget: DemoBudgetOption = None,
    scale: DemoScaleOption = "demo",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train two built-in models plainly and under half the memory: same losses, a picture of the memory, a report."""
    asked = budget or HALF
    check_request(asked)
    check_scale(scale)
    prepare_folder(output)
    device = choose_device(device)
    runs: list[dict[str, object]] = []
    for name in MODELS:
        with working(f"Training {name} on {device}, plainly and under {asked}"):
            make = _sized(name, scale=scale, device=device, seed=seed)
            run = compare_training(
                name, make, steps=steps, device=device, budget=asked, seed=seed, or_least=budget is None
            )
        picture, page = _draw(run, output), _write_page(run, output)
        runs.append({**run.facts.to_json(), "picture": str(picture), "report": str(page) if page is not None else None})
        if not as_json:
            show(training_table(run.facts), *([Text(f"  {run.facts.note}")] if run.facts.note else []))
            show(Text(f"  memory over the step: {picture}"))
            show(Text(f"  report: {page}\n" if page is not None else "  a report needs `remat[report]`\n"))
    if as_json:
        show_json({"runs": runs})
    _check(runs)


def _sized(name: str, *, scale: str, device: str, seed: int) -> Make:
    """The model at a batch that this device computes in reasonable time."""
    sizes = dict(SMALL_IMAGES) if (name, scale) == ("resnet18", "demo") else {}
    while True:
        make = partial(build, name, scale=scale, device=device, seed=seed, **sizes)
        example = make()
        batch = len(example.args[0])
        start = time.perf_counter()
        Trainee.plain(example).train_step(seed)
        if time.perf_counter() - start <= LONGEST_STEP_S or batch <= SMALLEST_BATCH:
            return make
        sizes["batch"] = max(SMALLEST_BATCH, batch // 2)


def _draw(run: Compared, output: Path) -> Path:
    facts = run.facts
    return draw_memory(
        output / f"memory-{facts.model}.png",
        name=facts.model,
        before=run.plain_timeline,
        after=run.planned_timeline,
        budget_bytes=facts.budget_bytes,
        moments="allocations and frees",
    )


def _write_page(run: Compared, output: Path) -> Path | None:
    """The report of the plan that trained, where its libraries are installed."""
    try:
        return write_report(output / f"report-{run.facts.model}.html", run.plan, name=run.facts.model)
    except MissingExtra:
        return None


def _check(runs: list[dict[str, object]]) -> None:
    """The demo fails loudly where it does not show what it promises."""
    for run in runs:
        if not run["same_losses"]:
            raise VerificationError(f"{run['model']} has other losses under the budget than plainly.")
        if not run["within_budget"]:
            raise VerificationError(f"{run['model']} went over its budget.")
