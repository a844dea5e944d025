"""`remat pareto`: minimum time for every budget, with what is proven about it and other strategies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from remat.cli.options import DeviceOption, JsonOption, OffloadOption, ScaleOption, SeedOption, TargetArgument
from remat.cli.request import check_folder, check_solvers
from remat.cli.subjects import CurveRequest, TargetSubject, open_subject
from remat.cli.target import runs_target
from remat.cli.terminal.console import log, show, show_json
from remat.cli.terminal.interrupt import Interrupt
from remat.cli.terminal.progress import parts
from remat.core.files.pareto_file import encode_pareto
from remat.core.results.pareto import Pareto
from remat.report.pictures.picture import check_picture
from remat.report.tables.chart import chart_text, pareto_chart
from remat.report.tables.pareto import pareto_tables

PointsOption = Annotated[
    int, typer.Option("--points", min=1, help="How many budgets, from the plain peak down to the smallest that fits.")
]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Really run the schedules; show measured peak and time.")]
SolversOption = Annotated[
    str | None,
    typer.Option("--solvers", metavar="A,B", help="Strategies to compare with; none at all: --solvers ''."),
]
EachLimitOption = Annotated[float, typer.Option("--time-limit", min=0.0, help="Seconds for each budget and solver.")]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write the curve as .json or .html, or draw it as .png or .svg.", show_default=False
    ),
]


def pareto(
    target: TargetArgument,
    points: PointsOption = 12,
    verify: VerifyOption = False,
    solvers: SolversOption = None,
    time_limit: EachLimitOption = 5.0,
    offload: OffloadOption = None,
    output: OutputOption = None,
    scale: ScaleOption = "tiny",
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Show what memory costs: the fastest schedule at each budget, from the plain peak down."""
    _check_output(output)
    names = None if solvers is None else check_solvers(solvers)
    subject = open_subject(target, scale=scale, device=device, seed=seed)
    with runs_target(target):
        found = _find(target, subject, points, names, time_limit, seed, verify, offload)
    if as_json:
        show_json(encode_pareto(found))
    else:
        show(*pareto_tables(found), Text(chart_text(pareto_chart(found))))
    if output is not None:
        log(f"Wrote {write_pareto(found, output)}")


def write_pareto(found: Pareto, path: Path) -> Path:
    """As JSON, as a page or as a picture, by the suffix."""
    if path.suffix == ".json":
        found.save(path)
        return path
    if path.suffix == ".html":
        return found.to_html(path)
    from remat.report.pictures.curve import draw_curve

    return draw_curve(path, pareto_chart(found))


def _check_output(output: Path | None) -> None:
    """Refuse a file that could not be written before anything slow starts."""
    if output is not None and output.suffix == ".html":
        from remat.report.write import find_format

        find_format(output)
    elif output is not None and output.suffix != ".json":
        check_picture(output)
    check_folder(output)


def _find(
    target: str,
    subject: TargetSubject,
    points: int,
    names: tuple[str, ...] | None,
    time_limit: float,
    seed: int,
    verify: bool,
    offload: str | None,
) -> Pareto:
    from remat.solvers import get_solver
    from remat.solvers.frontier import BASELINES

    interrupt = Interrupt()
    chosen = BASELINES if names is None else names
    lead = interrupt.heeded_by(get_solver("auto"))
    others = tuple(interrupt.heeded_by(get_solver(name)) for name in chosen if name != "auto")
    with interrupt.caught(log), parts(f"What memory costs: {target}") as tell:
        return subject.pareto(
            CurveRequest(points, lead, others, time_limit, seed, verify, offload, tell, stop=lambda: interrupt.asked)
        )
