"""`remat solve`: an instance file and a budget in, the fastest schedule found out. Needs no framework."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from remat.cli.console import show, show_json, working
from remat.cli.options import BudgetOption, JsonOption, SeedOption, SolverOption, TimeLimitOption
from remat.cli.request import check_request
from remat.core.budget import BudgetUnit, parse_budget
from remat.core.instance import load_problem
from remat.core.problem import Problem
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import BudgetError, InfeasibleBudget
from remat.report.text import solution_table


def solve(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A remat-instance or remat-problem file.")],
    budget: BudgetOption,
    solver: SolverOption = "auto",
    time_limit: TimeLimitOption = 60.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Solve an instance file: print the fastest schedule that fits the budget."""
    check_request(budget, solver)
    problem = _with_budget(load_problem(file), budget)
    # Imported here because other commands start faster without the solvers.
    from remat import solvers

    start = time.perf_counter()
    try:
        with working(f"Solving {file.name} ({len(problem.graph.ops)} ops)"):
            solution = solvers.solve(problem, solver, time_limit_s=time_limit, seed=seed)
    except InfeasibleBudget as error:
        if as_json:
            show_json(_infeasible_facts(problem, solver, error.min_budget, time.perf_counter() - start))
        raise
    seconds = time.perf_counter() - start
    solution = replace(solution, min_budget_bytes=_min_budget(problem, solution, start + time_limit))
    if as_json:
        show_json(_facts(problem, solution, seconds))
    else:
        show(solution_table(problem, solution, seconds, file.stem))


def _with_budget(problem: Problem, text: str) -> Problem:
    budget = parse_budget(text)
    if budget.unit is BudgetUnit.DEVICE_FRACTION:
        raise BudgetError(f"The budget {text!r} is a share of a device, and a file has none; write bytes or 0.6x.")
    plain_peak = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    return problem.with_budget(budget.resolve(plain_peak_bytes=plain_peak, device_bytes=0))


def _min_budget(problem: Problem, solution: Solution, deadline: float) -> int:
    """The smallest budget known, looked for in the time that is left."""
    from remat.solvers.floor import squeeze

    tape = squeeze(problem, stop=lambda: time.perf_counter() > deadline)
    return min(solution.min_budget_bytes, tape.peak)


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
