"""Which library solves a program, and what happens where it is missing, too small or too slow."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
from tests.contract import graphs

from remat.core import Status
from remat.core.search import child_process as child
from remat.core.search.child_process import run_child
from remat.core.search.limits import Limits
from remat.errors import MissingExtra, UnknownName
from remat.solvers import backends, get_solver
from remat.solvers.backends import TooLarge, get_backend
from remat.solvers.backends.program import EXACT_GAP, MixedIntegerProgram, Point
from remat.solvers.backends.watchdog import minimise_watched
from remat.solvers.exact.checkmate import Checkmate
from remat.solvers.exact.cp_sat import CpSat
from remat.solvers.exact.milp import Milp
from remat.solvers.exact.stages import make_stages
from remat.solvers.schedule.editable import flatten

LIBRARIES = {"highs": "highspy", "scip": "pyscipopt", "gurobi": "gurobipy", "cplex": "cplex"}
LICENSED = ("gurobi", "cplex")
LIMITS = Limits(20.0, gap=EXACT_GAP)
SMALL = graphs.squeezed(graphs.tiny(3, 8), 0.9)
LARGE = graphs.squeezed(graphs.transformer(3), 0.8)
every_backend = pytest.mark.parametrize("name", LIBRARIES)


def program_of(problem=SMALL) -> MixedIntegerProgram:  # type: ignore[no-untyped-def]
    flat = flatten(problem)
    stages = make_stages(flat)
    assert stages is not None
    return Checkmate(flat, problem.budget_bytes, stages).program


@every_backend
def test_backend_finds_the_optimum(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    answer = get_backend(name)(program_of(), LIMITS, {})
    assert answer.point is not None
    cost = sum(cost * x for cost, x in zip(program_of().cost, answer.point, strict=True))
    assert answer.bound == pytest.approx(cost, rel=1e-5) == pytest.approx(2380.952, rel=1e-5)


@every_backend
def test_backend_says_that_nothing_fits(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    program = MixedIntegerProgram()
    column = program.add_column(1.0)
    program.add_row([(column, 1.0)], lower=2.0)
    answer = get_backend(name)(program, LIMITS, {})
    assert answer.point is None and answer.bound == float("inf")


@every_backend
def test_backend_starts_from_a_known_point(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    program = MixedIntegerProgram()
    columns = [program.add_column(cost) for cost in (3.0, 2.0, 4.0)]
    program.add_row([(column, 1.0) for column in columns], lower=2.0, upper=2.0)
    answer = get_backend(name)(program, LIMITS, {0: 1.0, 1: 0.0, 2: 1.0})
    assert answer.point == pytest.approx((1.0, 1.0, 0.0))


@every_backend
def test_missing_library_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    extra = "solvers" if name == "highs" else name
    with pytest.raises(MissingExtra, match=rf"remat\[{extra}\]"):
        get_backend(name)(program_of(), LIMITS, {})


@pytest.mark.parametrize("name", LICENSED)
def test_licence_refuses_a_large_program(name: str) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    try:
        get_backend(name)(program_of(LARGE), Limits(0.5), {})
    except TooLarge as error:
        assert "licence" in str(error)
    else:
        pytest.skip(f"the licence of {name} has no such limit here")


def test_highs_takes_over_where_a_licence_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy", reason="highspy is not installed")

    def refuse(program: MixedIntegerProgram, limits: Limits, start: Point) -> None:
        raise TooLarge("Gurobi's licence does not allow a program of this size")

    monkeypatch.setitem(backends.BACKENDS, "gurobi", refuse)
    problem = graphs.squeezed(graphs.transformer(2), 0.6)
    solution = get_solver("milp:gurobi").solve(problem, Limits(20.0))
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
    monkeypatch.setattr("remat.solvers.exact.cp_sat.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"remat\[solvers\]"):
        CpSat().solve(graphs.squeezed(graphs.chain(8), 0.6), Limits(5.0))


def test_process_of_its_own_gives_the_same_answer() -> None:
    pytest.importorskip("highspy", reason="highspy is not installed")
    program = program_of()
    assert minimise_watched(program, LIMITS, relaxed=False) == get_backend("highs")(program, LIMITS, {})


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


def test_highs_has_the_time_of_the_process_where_that_is_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")
    highs, limits = get_backend("highs"), Limits(0.01, gap=EXACT_GAP)
    program = program_of(graphs.squeezed(graphs.transformer(2), 0.8))
    assert not highs(program, limits, {}).complete
    # A process that has taken no time yet has all of it left, however late it is.
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    assert highs(program, replace(limits, clock=time.process_time), {}).complete


def test_highs_stops_by_the_time_of_the_process_where_that_is_the_clock() -> None:
    pytest.importorskip("highspy")
    limits, began = Limits(0.2, gap=EXACT_GAP, clock=time.process_time), time.process_time()
    assert not get_backend("highs")(program_of(LARGE), limits, {}).complete
    assert time.process_time() - began < 10.0
