"""`remat layout`: buffers with their lifetimes in, an address for each of them out. Needs no framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.cli.options import JsonOption, SeedOption, TimeLimitOption
from remat.cli.request import check_folder
from remat.cli.terminal.console import log, show, show_json, working
from remat.cli.terminal.interrupt import Interrupt
from remat.core.garbage import collecting_only_what_is_new
from remat.errors import BudgetError, InfeasibleLayout
from remat.report.tables.text import layout_table

if TYPE_CHECKING:
    from remat.layout import LayoutProblem, Placement

FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Buffers as CSV: id,lower,upper,size and optionally alignment; or a plan or problem as JSON.",
    ),
]
CapacityOption = Annotated[
    int | None,
    typer.Option(
        "--capacity",
        "-c",
        metavar="N",
        help="Everything must lie below this; without it, as low as possible.",
        show_default=False,
    ),
]
SolverOption = Annotated[str, typer.Option("--solver", help="Which layout solver chooses the offsets.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="OUT", help="Write the buffers with their offsets.", show_default=False),
]


@collecting_only_what_is_new()
def layout(
    file: FileArgument,
    capacity: CapacityOption = None,
    time_limit: TimeLimitOption = 60.0,
    output: OutputOption = None,
    solver: SolverOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Give every buffer an address so that those alive together do not overlap."""
    # Imported here because other commands start faster without the solvers.
    from remat.layout import get_solver, load, place
    from remat.layout.csv_file import save_csv
    from remat.layout.sources import load_layout

    if capacity is not None and capacity <= 0:
        raise BudgetError(f"The capacity is {capacity}; it must be above zero.")
    interrupt, started = Interrupt(), time.perf_counter()
    chosen = interrupt.heeded_by(get_solver(solver))
    check_folder(output)
    problem = load_layout(file, capacity)
    start = time.perf_counter()
    # The file was read in the user's time.
    left = max(0.0, time_limit - (start - started))
    with interrupt.caught(log), working(f"Placing {len(problem.buffers)} buffers of {file.name}"):
        placement = place(problem, chosen, time_limit_s=left, seed=seed)
    seconds = time.perf_counter() - start
    fits = problem.fits(placement.height)
    if as_json:
        show_json(_facts(problem, placement, load(problem), seconds))
    elif fits:
        show(layout_table(problem, placement, load(problem), seconds, file.stem))
    if not fits:
        raise InfeasibleLayout(_refusal(problem, placement), placement.height)
    if output is not None:
        save_csv(problem, placement, output)


def _refusal(problem: LayoutProblem, placement: Placement) -> str:
    """Why nothing is written: proven impossible, or not found in time."""
    found, capacity = placement.height, problem.capacity
    if placement.bound > (capacity or 0):
        proof = f"No placement fits the capacity {capacity}: proven, every one needs at least {placement.bound}"
        return f"{proof}; the lowest found needs {found}. Raise the capacity."
    open_ = f"No placement within the capacity {capacity} was found; from {placement.bound} on none is excluded"
    return f"{open_}; the lowest found needs {found}. Raise the capacity or the time limit."


def _facts(problem: LayoutProblem, placement: Placement, load: int, seconds: float) -> dict[str, object]:
    return {
        "status": placement.status.value,
        "solver": placement.solver,
        "buffers": len(problem.buffers),
        "capacity": problem.capacity,
        "height": placement.height,
        "load": load,
        "total": sum(buffer.size for buffer in problem.buffers),
        "bound": placement.bound,
        "gap": placement.gap,
        "seconds": seconds,
        "offsets": {buffer.id: at for buffer, at in zip(problem.buffers, placement.offsets, strict=True)},
    }
