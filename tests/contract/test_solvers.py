"""What every solver of the registry promises, whatever its idea."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from _pytest.mark import ParameterSet
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import Problem, Solution, Status, plain_schedule, simulate, validate
from remat.core.search.limits import Limits
from remat.errors import InfeasibleBudget, UnknownName
from remat.solvers import REGISTRY, Solver, get_solver, min_budget, solve

LIMIT_S = 2.0
PROBLEMS = {
    "chain": graphs.chain(12, resident=7),
    "transformer": graphs.transformer(5),
    "layered0": graphs.layered(0),
    "layered1": graphs.layered(1),
}
SHARES = (1.0, 0.8, 0.6, 0.4)
EXACT = ("milp", "cp_sat", "lp_rounding")
NEVER_SETTLED = ("chain", 0.4)
"""Nothing fits, and proving it takes long."""

NEEDS = {"milp": "highspy", "cp_sat": "ortools", "lp_rounding": "highspy"}


def _parameter(solver: Solver) -> ParameterSet:
    library = NEEDS.get(solver.name, "sys")
    missing = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed")
    return pytest.param(solver, marks=missing, id=solver.name)


every_solver = pytest.mark.parametrize("solver", [_parameter(solver) for solver in REGISTRY])
every_problem = pytest.mark.parametrize("name", PROBLEMS)


@cache
def answer(solver: Solver, name: str, share: float) -> tuple[Problem, Solution]:
    problem = graphs.squeezed(PROBLEMS[name], share)
    # `auto` ends by itself, and on a busy machine it must: only then can it be held against the others.
    has_time = solver.name == "auto" and (name, share) != NEVER_SETTLED
    return problem, solver.solve(problem, Limits(60.0 if has_time else LIMIT_S))


@every_solver
@every_problem
@pytest.mark.parametrize("share", SHARES)
def test_schedule_is_valid_and_within_budget(solver: Solver, name: str, share: float) -> None:
    problem, solution = answer(solver, name, share)
    if solution.schedule is not None:
        assert validate(problem, solution.schedule) == solution.peak_bytes <= problem.budget_bytes
        assert simulate(problem, solution.schedule).time_ns == pytest.approx(solution.time_ns)


@every_solver
@every_problem
@pytest.mark.parametrize("share", SHARES)
def test_status_says_whether_there_is_a_schedule(solver: Solver, name: str, share: float) -> None:
    problem, solution = answer(solver, name, share)
    assert (solution.schedule is None) == (solution.status is Status.INFEASIBLE)
    assert solution.solver == solver.name
    assert problem.base_time_ns <= solution.bound_ns <= solution.time_ns * (1 + 1e-9)
    if solution.status is Status.OPTIMAL:
        assert solution.gap <= 1e-6
    if solution.status is Status.INFEASIBLE:
        assert solution.min_budget_bytes > problem.budget_bytes


@every_solver
@every_problem
def test_runs_pinned_ops_once(solver: Solver, name: str) -> None:
    problem, solution = answer(solver, name, 0.6)
    if solution.schedule is not None:
        again = solution.schedule.recomputed()
        assert all(problem.graph.ops[op].recomputable for op in again)


@every_solver
def test_same_seed_gives_same_schedule(solver: Solver) -> None:
    problem = graphs.squeezed(graphs.transformer(2), 0.6)
    first, second = (solver.solve(problem, Limits(20.0, seed=3)) for _ in range(2))
    assert first == second


@every_solver
def test_budget_that_fits_everything_gives_the_plain_time(solver: Solver) -> None:
    problem = graphs.squeezed(PROBLEMS["chain"], 1.0)
    solution = solver.solve(problem, Limits(LIMIT_S))
    if solver.name in ("auto", "none"):
        assert solution.schedule == plain_schedule(problem.graph)
        assert solution.status is Status.OPTIMAL


@every_solver
def test_budget_below_every_op_is_infeasible(solver: Solver) -> None:
    problem = PROBLEMS["transformer"].with_budget(10)
    solution = solver.solve(problem, Limits(LIMIT_S))
    assert solution.status is Status.INFEASIBLE
    assert solution.min_budget_bytes > 10
    # A busy machine may find another least the second time.
    found = SimpleNamespace(name=solver.name, solve=lambda *_: solution)
    with pytest.raises(InfeasibleBudget) as caught:
        solve(problem, found, time_limit_s=LIMIT_S)
    assert caught.value.min_budget == solution.min_budget_bytes


@every_solver
def test_empty_graph_has_an_empty_schedule(solver: Solver) -> None:
    solution = solver.solve(graphs.Builder().problem([]), Limits(LIMIT_S))
    assert solution.status is Status.OPTIMAL
    assert solution.schedule is not None and solution.schedule.steps == ()


@every_solver
@pytest.mark.parametrize("problem", graphs.awkward(), ids=lambda problem: problem.graph.name)
@pytest.mark.parametrize("limit_s", [0.0, LIMIT_S])
def test_awkward_graph_gets_a_schedule_or_a_budget(solver: Solver, problem: Problem, limit_s: float) -> None:
    for share in (1.0, 0.5):
        limited = graphs.squeezed(problem, share)
        solution = solver.solve(limited, Limits(limit_s))
        if solution.schedule is not None:
            assert validate(limited, solution.schedule) <= limited.budget_bytes
        else:
            assert solution.min_budget_bytes > limited.budget_bytes
    assert solver.solve(problem, Limits(limit_s)).schedule is not None


@every_solver
@pytest.mark.parametrize("seed", range(12))
def test_never_beats_brute_force(solver: Solver, seed: int) -> None:
    for share in (0.9, 0.75):
        problem = graphs.squeezed(graphs.tiny(seed), share)
        optimum = best_time(problem)
        solution = solver.solve(problem, Limits(LIMIT_S))
        if optimum is None:
            assert solution.status is Status.INFEASIBLE
        elif solution.schedule is not None:
            assert solution.time_ns >= optimum - 1e-6
            assert solution.bound_ns <= optimum + 1e-6


def test_auto_equals_brute_force_on_small_graphs() -> None:
    for seed in range(40):
        problem = graphs.squeezed(graphs.tiny(seed), 0.9)
        optimum = best_time(problem)
        solution = get_solver("auto").solve(problem, Limits(LIMIT_S))
        assert solution.schedule is None if optimum is None else solution.time_ns == pytest.approx(optimum)


@every_problem
@pytest.mark.parametrize("share", SHARES)
def test_auto_is_never_worse_than_a_strategy(name: str, share: float) -> None:
    _, best = answer(get_solver("auto"), name, share)
    for solver in REGISTRY:
        if find_spec(NEEDS.get(solver.name, "sys")) is None:
            continue
        _, solution = answer(solver, name, share)
        if solution.schedule is not None:
            assert best.schedule is not None
            # Exact solvers may use up the gap at which auto stops.
            gap = 1e-3 if solver.name in EXACT else 1e-9
            assert best.time_ns <= solution.time_ns * (1 + gap)


@every_problem
def test_auto_accepts_the_smallest_budget_it_names(name: str) -> None:
    smallest = min_budget(PROBLEMS[name])
    assert solve(PROBLEMS[name].with_budget(smallest), time_limit_s=LIMIT_S).peak_bytes <= smallest


def test_unknown_solver_is_refused_with_the_list() -> None:
    with pytest.raises(UnknownName, match=r"sqrt_n.*Choose one of auto, none"):
        get_solver("sqrtn")
