"""`remat ladder`: one lever more on each rung, predicted and, where this machine can, measured."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from remat.cli.estimate import BatchOption, DevicesOption, LengthOption, SetOption
from remat.cli.fit import MemoryOption, PageOption, check_html, example_of_target, read_memory
from remat.cli.options import JsonOption, ScaleOption, TargetArgument
from remat.cli.request import check_folder
from remat.cli.target import read_sizes, runs_target
from remat.cli.terminal.console import log, show, show_json, working
from remat.report.tables.fit import fit_chart, fit_sheet

if TYPE_CHECKING:
    from remat.fit.ladder import Rung
    from remat.fit.outcomes import Evaluator

GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="A device of the catalogue, as H100-80GB; without it, this machine's."),
]
RanksOption = Annotated[int, typer.Option("--gpus", min=2, help="Ranks of the last rungs.")]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Run the rungs of one device here, too: the model is built in memory.")
]


def ladder(
    target: TargetArgument,
    gpu: GpuOption = None,
    gpus: RanksOption = 8,
    batch: BatchOption = None,
    length: LengthOption = None,
    settings: SetOption = None,
    memory: MemoryOption = None,
    measure: MeasureOption = False,
    devices: DevicesOption = None,
    report: PageOption = None,
    scale: ScaleOption = "tiny",
    as_json: JsonOption = False,
) -> None:
    """Climb from plain training to ZeRO-3 with offload: what each lever saves and costs."""
    check_folder(report)
    check_html(report)
    sizes = read_sizes(settings or (), batch=batch, length=length)
    began = time.perf_counter()
    found = _climb(target, scale, sizes, gpu, gpus, read_memory(memory), tuple(devices or ()), measure)
    from remat.fit.ladder import ladder_sheet

    sheet = ladder_sheet(target, *found, began)
    if as_json:
        show_json(asdict(sheet))
    else:
        show(fit_sheet(sheet).as_table(), Text(fit_chart(sheet)), Text("\n".join(sheet.sentences)))
    if report is not None:
        from remat.report.html.fit_page import write_fit_page

        write_fit_page(sheet, report)
        log(f"Wrote {report}")


def _climb(
    target: str,
    scale: str,
    sizes: dict[str, float],
    gpu: str | None,
    ranks: int,
    memory: int | None,
    devices: tuple[Path, ...],
    is_measured: bool,
) -> tuple[Evaluator, list[Rung]]:
    from remat.fit.cluster import find_cluster
    from remat.fit.ladder import climb, measured
    from remat.fit.outcomes import Evaluator, Traces
    from remat.pytorch.explore.resize import size_along

    cluster = find_cluster(gpu or "cpu", 1, memory_bytes=memory, devices=devices)
    example = example_of_target(target, scale, sizes, real=is_measured)
    evaluator = Evaluator(Traces(example.model, example.args, example.kwargs, gpu, devices), cluster)
    with working(f"Climbing {target}"), runs_target(target):
        rungs = list(climb(evaluator, size_along(example, "batch"), ranks))
        if is_measured:
            rungs = [measured(rung, example) for rung in rungs]
    return evaluator, rungs
