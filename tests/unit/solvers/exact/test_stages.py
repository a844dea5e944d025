"""The exact programs: from a schedule to a point and back, and what solvers do when they may not search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.contract import graphs

from remat.core import Problem, Schedule, Status, simulate
from remat.core.search.limits import Limits
from remat.solvers import get_solver, min_budget
from remat.solvers.exact.checkmate import Checkmate
from remat.solvers.exact.milp import Milp
from remat.solvers.exact.stages import make_stages, split_steps, stage_of_steps, to_schedule
from remat.solvers.schedule.editable import flatten
from remat.solvers.search.start import quick_schedule

FAMILIES = [graphs.squeezed(graphs.chain(8), 0.6), graphs.squeezed(graphs.layered(0), 0.6)]
EXACT = ("milp", "cp_sat", "lp_rounding")
every_family = pytest.mark.parametrize("problem", FAMILIES, ids=lambda problem: problem.graph.name)
every_exact = pytest.mark.parametrize("name", EXACT)


def known(problem: Problem) -> Schedule:
    schedule = quick_schedule(problem, Limits(1.0))
    assert schedule is not None
    return schedule


@every_family
@pytest.mark.parametrize("ordered", [False, True])
def test_schedule_and_point_are_the_same(problem: Problem, ordered: bool) -> None:
    flat, schedule = flatten(problem), known(problem)
    stages = make_stages(flat, ordered=range(flat.count + 1) if ordered else (), passes=2)
    assert stages is not None
    model = Checkmate(flat, problem.budget_bytes, stages)
    point = model.point_of(problem, schedule)
    found = to_schedule(flat, stages, model.held_at([point.get(column, 0.0) for column in range(len(point))]))
    assert found is not None
    assert simulate(problem, found).time_ns <= simulate(problem, schedule).time_ns
    assert simulate(problem, found).peak_bytes <= problem.budget_bytes


def test_steps_belong_to_the_stage_that_the_next_first_run_ends() -> None:
    assert stage_of_steps(Schedule((0, 1, 0, 2, 1, 0))) == [0, 1, 2, 2, 3, 3]  # type: ignore[arg-type]


def test_stage_with_too_few_passes_is_refused() -> None:
    build = graphs.Builder()
    for _ in range(4):
        build.add("op", [], [1], 1)
    flat = flatten(build.problem([0, 1, 2, 3]))
    schedule = Schedule((0, 1, 2, 2, 1, 0, 3))  # type: ignore[arg-type]
    for passes, fits in ((1, False), (2, False), (3, True)):
        stages = make_stages(flat, ordered=[3], passes=passes)
        assert stages is not None
        assert (split_steps(stages, schedule) is not None) == fits


@every_exact
def test_no_time_gives_a_quick_schedule(name: str) -> None:
    solution = get_solver(name).solve(FAMILIES[0], Limits(0.0))
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert solution.bound_ns == FAMILIES[0].base_time_ns


@every_exact
def test_no_time_and_too_small_a_budget_names_the_smallest(name: str) -> None:
    problem = FAMILIES[0].with_budget(1)
    solution = get_solver(name).solve(problem, Limits(0.0))
    assert solution.status is Status.INFEASIBLE
    assert solution.min_budget_bytes == min_budget(problem)


def test_too_large_a_program_falls_back_to_a_quick_schedule() -> None:
    solution = replace(Milp(), max_choices=10).solve(FAMILIES[0], Limits(20.0))
    assert solution.schedule is not None
    assert solution.bound_ns == FAMILIES[0].base_time_ns
    assert solution.reason == "A program with more than 10 choices is not tried."
