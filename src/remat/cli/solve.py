"""`remat solve`: an instance file and a budget in, the fastest schedule found out. Needs no framework."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from remat.cli.options import JsonOption, SeedOption, TimeLimitOption
from remat.cli.request import check_folder, check_request
from remat.cli.sweep import show_sweep
from remat.cli.terminal.console import log, show, show_json
from remat.cli.terminal.interrupt import Interrupt
from remat.cli.terminal.progress import solving
from remat.core.budget import BudgetUnit, parse_budget
from remat.core.eager import as_eager
from remat.core.files.problem_file import load_problem
from remat.core.garbage import collecting_only_what_is_new
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.search.limits import Limits
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import BudgetError, InfeasibleBudget, UnknownName
from remat.report.pictures.picture import check_picture
from remat.report.tables.text import solution_table

FileBudgetOption = Annotated[
    str | None,
    typer.Option("--budget", "-b", help='Bytes, "8GiB", "500MB", or "0.5x" of the plain peak.', show_default=False),
]
SweepOption = Annotated[
    int | None,
    typer.Option(
        "--sweep",
        min=1,
        metavar="N",
        help="Instead of one budget, N of them from the plain peak down to just above the floor.",
        show_default=False,
    ),
]
SolversOption = Annotated[
    list[str] | None,
    typer.Option(
        "--solver",
        help="Which solver makes the schedule: auto, or with --sweep all of them. May be repeated with --sweep.",
        show_default=False,
    ),
]
GapOption = Annotated[
    float, typer.Option("--gap", min=0.0, help="Stop once proven to be within this share of the fastest schedule.")
]
ReorderOption = Annotated[
    bool, typer.Option("--reorder", help="Let first runs change their order; the bound then holds for any order.")
]
CurveOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="With --sweep: draw the curve as .png or .svg.", show_default=False),
]


@collecting_only_what_is_new()
def solve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A remat-instance or remat-problem file.")],
    budget: FileBudgetOption = None,
    sweep: SweepOption = None,
    solver: SolversOption = None,
    time_limit: TimeLimitOption = 60.0,
    gap: GapOption = 1e-3,
    reorder: ReorderOption = False,
    seed: SeedOption = 0,
    output: CurveOption = None,
    as_json: JsonOption = False,
) -> None:
    """Solve an instance file: print the fastest schedule that fits the budget, or what each budget costs."""
    started, names = time.perf_counter(), solver or []
    _check(budget, sweep, names, output, reorder)
    problem = load_problem(file)
    # The file was read in the user's time.
    left = max(0.0, time_limit - (time.perf_counter() - started))
    name, limits = problem.graph.name or file.stem, Limits(left, gap, seed)
    if sweep is not None:
        show_sweep(problem, names, sweep, limits, name=name, output=output, as_json=as_json)
    elif budget is not None:
        _solve_once(_with_budget(problem, budget), file, (names or ["auto"])[0], limits, reorder, as_json)


def _check(budget: str | None, sweep: int | None, names: list[str], output: Path | None, reorder: bool) -> None:
    """Refuse what does not go together before anything slow starts."""
    if (budget is None) == (sweep is None):
        raise BudgetError("Say how much memory there is: either --budget, or --sweep for several budgets.")
    if sweep is None and len(names) > 1:
        raise UnknownName(f"One budget is solved by one solver, not by {', '.join(names)}; use --sweep to compare.")
    if sweep is None and output is not None:
        raise UnknownName(f"A single budget has no curve to write to {output}; use --sweep.")
    if sweep is not None and reorder:
        raise UnknownName("A sweep compares solvers in the file's order; use --reorder with --budget.")
    for name in names or ["auto"]:
        check_request(budget or "1x", name)
    if output is not None:
        check_picture(output)
        check_folder(output)


def _solve_once(problem: Problem, file: Path, solver: str, limits: Limits, reorder: bool, as_json: bool) -> None:
    # Imported here because other commands start faster without the solvers.
    from remat import solvers

    interrupt = Interrupt()
    chosen = interrupt.heeded_by(solvers.get_solver(solver))
    start = time.perf_counter()
    try:
        message = f"Solving {file.name} ({len(problem.graph.ops)} ops)"
        with interrupt.caught(log), solving(message, problem.base_time_ns) as progress:
            solution = solvers.solve(
                problem,
                chosen,
                time_limit_s=limits.time_limit_s,
                seed=limits.seed,
                gap=limits.gap,
                reorder=reorder,
                progress=progress,
            )
    except InfeasibleBudget as error:
        if as_json:
            show_json(_infeasible_facts(problem, solver, error.min_budget, time.perf_counter() - start))
        raise
    seconds = time.perf_counter() - start
    deadline = start if interrupt.asked else start + limits.time_limit_s
    solution = replace(solution, min_budget_bytes=_min_budget(problem, solution, deadline))
    if as_json:
        show_json(_facts(problem, solution, seconds))
    else:
        show(solution_table(problem, solution, seconds, file.stem))


def _with_budget(problem: Problem, text: str) -> Problem:
    budget = parse_budget(text)
    if budget.unit is BudgetUnit.DEVICE_FRACTION:
        raise BudgetError(f"The budget {text!r} is a share of a device, and a file has none; write bytes or 0.6x.")
    plain_peak = simulate(as_eager(problem), plain_schedule(problem.graph)).peak_bytes
    return problem.with_budget(budget.resolve(plain_peak_bytes=plain_peak, device_bytes=0))


def _min_budget(problem: Problem, solution: Solution, deadline: float) -> int:
    """The smallest budget known, looked for in the time that is left."""
    from remat.core.search.deadline import OutOfTime, within
    from remat.solvers import hard_limit_s
    from remat.solvers.search.floor import lowest_schedule

    try:
        with within(hard_limit_s(problem, deadline - time.perf_counter())):
            lowest = lowest_schedule(problem, stop=lambda: time.perf_counter() > deadline)
    except OutOfTime:
        return solution.min_budget_bytes
    return min(solution.min_budget_bytes, simulate(problem, lowest).peak_bytes)


def _facts(problem: Problem, solution: Solution, seconds: float) -> dict[str, object]:
    return {
        "status": solution.status.value,
        "solver": solution.solver,
        "time": solution.time_ns,
        "base_time": problem.base_time_ns,
        "bound": solution.bound_ns,
        "gap": solution.gap,
        "peak": solution.peak_bytes,
        "budget": problem.budget_bytes,
        "min_budget": solution.min_budget_bytes,
        "seconds": seconds,
        "schedule": list(solution.schedule.steps) if solution.schedule is not None else None,
    }


def _infeasible_facts(problem: Problem, solver: str, min_budget: int, seconds: float) -> dict[str, object]:
    """The same fields; those of a schedule are null because there is none."""
    return {
        "status": Status.INFEASIBLE.value,
        "solver": solver,
        "time": None,
        "base_time": problem.base_time_ns,
        "bound": None,
        "gap": None,
        "peak": None,
        "budget": problem.budget_bytes,
        "min_budget": min_budget,
        "seconds": seconds,
        "schedule": None,
    }
