"""What every layout solver keeps to, whatever it does inside."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from remat.layout import REGISTRY, Buffer, LayoutProblem, LayoutSolver, LayoutStatus, load, place, validate
from remat.layout.synthetic import dissected, random_lives, training

SOLVERS = [
    pytest.param(
        solver,
        id=solver.name,
        marks=pytest.mark.skipif(
            solver.name == "cp_sat" and find_spec("ortools") is None, reason="ortools is not installed"
        ),
    )
    for solver in REGISTRY
]
PROBLEMS = {
    "empty": LayoutProblem(()),
    "single": LayoutProblem((Buffer("only", -5, 7, 3),)),
    "disjoint": LayoutProblem(tuple(Buffer(str(i), i, i + 1, i + 1) for i in range(5))),
    "aligned": LayoutProblem(tuple(Buffer(str(i), i, i + 4, 3 + i, 4 if i % 2 else 6) for i in range(8))),
    "random": random_lives(60, horizon=200, longest=60),
    "dissected": dissected(40),
    "training": training(6),
}
TIME_LIMIT_S = 0.5


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_placement_is_valid_and_its_bound_true(solver: LayoutSolver, name: str) -> None:
    problem = replace(PROBLEMS[name], capacity=None)
    placement = place(problem, solver, time_limit_s=TIME_LIMIT_S)
    validate(problem, placement)
    assert load(problem) <= placement.bound <= placement.height
    assert placement.solver == solver.name
    assert (placement.status is LayoutStatus.OPTIMAL) == (placement.height == placement.bound)


@pytest.mark.parametrize("solver", SOLVERS)
def test_capacity_below_the_load_is_infeasible(solver: LayoutSolver) -> None:
    problem = random_lives(30, horizon=100, longest=50)
    placement = place(replace(problem, capacity=load(problem) - 1), solver, time_limit_s=TIME_LIMIT_S)
    assert placement.status is LayoutStatus.INFEASIBLE


@pytest.mark.parametrize("solver", SOLVERS)
def test_status_says_whether_the_capacity_is_kept(solver: LayoutSolver) -> None:
    problem = dissected(40, seed=2)
    placement = place(problem, solver, time_limit_s=TIME_LIMIT_S)
    fits = placement.status in (LayoutStatus.OPTIMAL, LayoutStatus.FEASIBLE)
    assert fits == (placement.height <= 1024)


@pytest.mark.parametrize("solver", SOLVERS)
def test_same_seed_gives_the_same_placement(solver: LayoutSolver) -> None:
    problem = replace(random_lives(25, horizon=100, longest=50), capacity=None)
    first, second = (place(problem, solver, time_limit_s=5, seed=1) for _ in range(2))
    assert first == second
