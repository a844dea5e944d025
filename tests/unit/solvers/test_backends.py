"""Which library solves a program, and what happens where it is missing, too small or too slow."""

from __future__ import annotations

import sys
import time

import pytest
from tests.contract import graphs

from remat.core import Status
from remat.errors import MissingExtra, UnknownName
from remat.solvers import backends, child, get_solver
from remat.solvers.backends import TooLarge, get_backend
from remat.solvers.backends.watchdog import minimise_watched
from remat.solvers.checkmate import Checkmate
from remat.solvers.child import run_child
from remat.solvers.cp_sat import CpSat
from remat.solvers.milp import Milp
from remat.solvers.program import Limits, Program
from remat.solvers.stages import make_stages
from remat.solvers.tape import shape_of

LIBRARIES = {"highs": "highspy", "scip": "pyscipopt", "gurobi": "gurobipy", "cplex": "cplex"}
LICENSED = ("gurobi", "cplex")
SMALL = graphs.squeezed(graphs.tiny(3, 8), 0.9)
LARGE = graphs.squeezed(graphs.transformer(3), 0.8)
every_backend = pytest.mark.parametrize("name", LIBRARIES)


def program_of(problem=SMALL) -> Program:  # type: ignore[no-untyped-def]
    shape = shape_of(problem)
    stages = make_stages(shape)
    assert stages is not None
    return Checkmate(shape, problem.budget_bytes, stages).program


@every_backend
def test_backend_finds_the_optimum(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    answer = get_backend(name)(program_of(), Limits(20.0))
    assert answer.point is not None
    cost = sum(cost * x for cost, x in zip(program_of().cost, answer.point, strict=True))
    assert answer.bound == pytest.approx(cost, rel=1e-5) == pytest.approx(2380.952, rel=1e-5)


@every_backend
def test_backend_says_that_nothing_fits(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    program = Program()
    column = program.add_column(1.0)
    program.add_row([(column, 1.0)], lower=2.0)
    answer = get_backend(name)(program, Limits(20.0))
    assert answer.point is None and answer.bound == float("inf")


@every_backend
def test_backend_starts_from_a_known_point(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    program = Program()
    columns = [program.add_column(cost) for cost in (3.0, 2.0, 4.0)]
    program.add_row([(column, 1.0) for column in columns], lower=2.0, upper=2.0)
    answer = get_backend(name)(program, Limits(20.0, start={0: 1.0, 1: 0.0, 2: 1.0}))
    assert answer.point == pytest.approx((1.0, 1.0, 0.0))


@every_backend
def test_missing_library_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    extra = "solvers" if name == "highs" else name
    with pytest.raises(MissingExtra, match=rf"remat\[{extra}\]"):
        get_backend(name)(program_of(), Limits(1.0))


@pytest.mark.parametrize("name", LICENSED)
def test_licence_refuses_a_large_program(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    try:
        get_backend(name)(program_of(LARGE), Limits(0.5))
    except TooLarge as error:
        assert "licence" in str(error)
    else:
        pytest.skip(f"the licence of {name} has no such limit here")


def test_highs_takes_over_where_a_licence_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy", reason="highspy is not installed")

    def refuse(program: Program, limits: Limits) -> None:
        raise TooLarge("Gurobi's licence does not allow a program of this size")

    monkeypatch.setitem(backends.BACKENDS, "gurobi", refuse)
    problem = graphs.squeezed(graphs.transformer(2), 0.6)
    solution = get_solver("milp:gurobi").solve(problem, time_limit_s=20.0)
    assert solution.status is Status.OPTIMAL
    assert "licence does not allow a program of this size; HiGHS took over." in solution.reason


def test_name_chooses_the_backend() -> None:
    solver = get_solver("milp:scip")
    assert isinstance(solver, Milp)
    assert (solver.name, solver.backend) == ("milp:scip", "scip")


def test_unknown_backend_is_refused_with_the_list() -> None:
    with pytest.raises(UnknownName, match="`glpk`; choose one of highs, scip, gurobi, cplex"):
        get_solver("milp:glpk")
    with pytest.raises(UnknownName, match="no solver `auto:scip`"):
        get_solver("auto:scip")


def test_missing_ortools_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.solvers.cp_sat.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"remat\[solvers\]"):
        CpSat().solve(graphs.squeezed(graphs.chain(8), 0.6), time_limit_s=5.0)


def test_process_of_its_own_gives_the_same_answer() -> None:
    pytest.importorskip("highspy", reason="highspy is not installed")
    program, limits = program_of(), Limits(20.0)
    assert minimise_watched(program, limits, relaxed=False) == get_backend("highs")(program, limits)


def test_process_is_ended_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "sleeper.py").write_text("import time\n\n\ndef main():\n    time.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(child, "GRACE_S", 0.1)
    start = time.monotonic()
    assert run_child("sleeper", b"", 0.1) is None
    assert time.monotonic() - start < 300


def test_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "failing.py").write_text("def main():\n    raise ValueError('no such luck')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="no such luck"):
        run_child("failing", b"", 60.0)
