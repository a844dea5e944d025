"""Exact solvers against brute force, against each other and against the portfolio."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import Status, simulate, validate
from remat.core.search.limits import Limits
from remat.solvers import Solver, get_solver
from remat.solvers.auto import Auto
from remat.solvers.exact.cp_sat import CpSat
from remat.solvers.exact.milp import Milp

pytest.importorskip("highspy", reason="highspy is not installed")
LIMIT_S = 60.0
EXACT = (Milp(), Auto())
NETWORKS = {
    "chain": graphs.squeezed(graphs.chain(8), 0.6),
    "transformer": graphs.squeezed(graphs.transformer(2), 0.6),
    "layered": graphs.squeezed(graphs.layered(0), 0.6),
}


def check(solver: Solver, seeds: range) -> tuple[int, int]:
    """Compare with brute force; returns how many problems have a schedule and how many were proven optimal."""
    feasible = proven = 0
    for problem in graphs.small_problems(seeds):
        optimum = best_time(problem)
        solution = solver.solve(problem, Limits(LIMIT_S, gap=0.0))
        where = f"{problem.graph.name} under {problem.budget_bytes}"
        assert (solution.schedule is None) == (optimum is None), where
        if optimum is not None and solution.schedule is not None:
            assert validate(problem, solution.schedule) <= problem.budget_bytes
            assert solution.time_ns == pytest.approx(optimum), where
            assert solution.bound_ns <= optimum + 1e-6, where
            feasible += 1
            proven += solution.status is Status.OPTIMAL
    return feasible, proven


@pytest.mark.parametrize("solver", EXACT, ids=lambda solver: solver.name)
def test_equals_brute_force(solver: Solver) -> None:
    feasible, proven = check(solver, range(24))
    assert feasible > 18
    assert proven > 0.9 * feasible


@pytest.mark.long
@pytest.mark.parametrize("solver", EXACT, ids=lambda solver: solver.name)
def test_equals_brute_force_on_thousands(solver: Solver) -> None:
    feasible, proven = check(solver, range(24, 1500))
    assert feasible > 1000
    assert proven > 0.9 * feasible


def test_bound_holds_for_schedules_that_go_back_and_forth_within_a_stage() -> None:
    """Here the optimum runs ops out of graph order between two first runs, which Checkmate's stages cannot."""
    problem = graphs.squeezed(graphs.tiny(1097, 8), 0.75)
    optimum = best_time(problem)
    in_one_pass = replace(Milp(), passes=1).solve(problem, Limits(LIMIT_S))
    assert optimum == 75 and in_one_pass.time_ns == 77
    assert in_one_pass.bound_ns <= optimum
    assert in_one_pass.status is Status.FEASIBLE
    assert Milp().solve(problem, Limits(LIMIT_S)).time_ns == optimum


_RETENTION = """
import json, sys
from tests.contract.graphs import small_problems
from remat.core import simulate
from remat.solvers.exact.retention import Retention
found = []
for problem in small_problems(range(*map(int, sys.argv[1:]))):
    schedule, is_complete = Retention(problem, 5, 3).search(60.0)
    assert is_complete
    found.append(None if schedule is None else simulate(problem, schedule).time_ns)
print(json.dumps(found))
"""


@pytest.mark.parametrize("seeds", [(0, 12), pytest.param((12, 75), marks=pytest.mark.long)])
def test_retention_intervals_equal_brute_force_when_ops_may_run_often(seeds: tuple[int, int]) -> None:
    # One process for all of them: OR-Tools cannot be loaded beside highspy.
    pytest.importorskip("ortools", reason="ortools is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _RETENTION, *map(str, seeds)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    for problem, found in zip(graphs.small_problems(range(*seeds)), json.loads(done.stdout), strict=True):
        assert found == best_time(problem), problem.graph.name


@pytest.mark.parametrize("name", NETWORKS)
def test_exact_solvers_agree_with_each_other_and_with_auto(name: str) -> None:
    pytest.importorskip("ortools", reason="ortools is not installed")
    problem = NETWORKS[name]
    best = Milp().solve(problem, Limits(LIMIT_S))
    other = CpSat(computations=3).solve(problem, Limits(LIMIT_S))
    auto = get_solver("auto").solve(problem, Limits(LIMIT_S))
    assert best.status is Status.OPTIMAL
    assert best.time_ns == other.time_ns
    assert best.time_ns <= auto.time_ns * (1 + 1e-6) <= best.time_ns * 1.002
    assert auto.bound_ns <= best.time_ns * (1 + 1e-6)


def test_cp_sat_proves_nothing_beyond_its_runs_per_op() -> None:
    pytest.importorskip("ortools", reason="ortools is not installed")
    solution = CpSat().solve(NETWORKS["chain"], Limits(LIMIT_S))
    assert solution.status is Status.FEASIBLE
    assert solution.bound_ns == NETWORKS["chain"].base_time_ns
    assert solution.reason == "The best with at most 2 runs of each op."


def test_relaxation_bounds_and_rounding_fits() -> None:
    problem = NETWORKS["transformer"]
    exact = Milp().solve(problem, Limits(LIMIT_S))
    rounded = get_solver("lp_rounding").solve(problem, Limits(LIMIT_S))
    assert rounded.schedule is not None
    assert simulate(problem, rounded.schedule).peak_bytes <= problem.budget_bytes
    assert problem.base_time_ns < rounded.bound_ns <= exact.time_ns <= rounded.time_ns
