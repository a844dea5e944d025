"""Searches that are ended wherever they are, and answers that exist all the same."""

from __future__ import annotations

import time
import tracemalloc
from importlib.util import find_spec
from itertools import count

import pytest
from tests.contract import graphs

from remat.core import Problem, Status, plain_schedule, simulate, validate
from remat.core.search.deadline import OutOfTime, check_time, within
from remat.core.search.limits import Limits
from remat.errors import InfeasibleBudget
from remat.solvers import REGISTRY, Solver, hard_limit_s, solve
from remat.solvers.exact.stages import make_stages
from remat.solvers.reorder import Reordered
from remat.solvers.schedule.editable import EditableSchedule, flatten
from remat.zoo import synthetic

NEEDS = {"milp": "highspy", "cp_sat": "ortools", "lp_rounding": "highspy"}
SOLVERS = pytest.mark.parametrize(
    "solver",
    [
        pytest.param(
            solver,
            id=solver.name,
            marks=pytest.mark.skipif(find_spec(NEEDS.get(solver.name, "sys")) is None, reason="its library is missing"),
        )
        for solver in REGISTRY
    ],
)


def after(looks: int):
    """A deadline that is over at the given number of looks at the clock: the same on every machine."""
    ticks = count()
    return within(looks, lambda: float(next(ticks)))


def test_time_is_up_only_within_and_only_after_it() -> None:
    check_time()
    with after(3):
        for _ in range(2):
            check_time()
        with pytest.raises(OutOfTime):
            for _ in range(3):
                check_time()
    check_time()


def test_closer_limit_around_stays() -> None:
    with within(0.0), within(100.0):
        time.sleep(0.01)
        with pytest.raises(OutOfTime):
            check_time()


@SOLVERS
@pytest.mark.parametrize("looks", [0, 10, 300, 3000])
def test_solver_that_is_ended_anywhere_has_an_answer(solver: Solver, looks: int) -> None:
    problem = graphs.squeezed(graphs.transformer(3), 0.6)
    with after(looks):
        found = solver.solve(problem, Limits(0.3))
    if found.schedule is None:
        assert found.status is Status.INFEASIBLE
        assert found.min_budget_bytes > problem.budget_bytes
    else:
        assert validate(problem, found.schedule) == found.peak_bytes <= problem.budget_bytes


@pytest.mark.parametrize("looks", [0, 5, 500])
def test_order_that_is_not_found_in_time_is_the_graphs_own(looks: int) -> None:
    problem = graphs.squeezed(graphs.transformer(3), 1.0)
    with after(looks):
        found = Reordered(REGISTRY[0]).solve(problem, Limits(0.3))
    assert found.schedule is not None
    validate(problem, found.schedule, keep_order=False)


@pytest.mark.parametrize("looks", [0, 10, 1000])
def test_overwriting_that_is_ended_anywhere_has_an_answer(looks: int) -> None:
    problem = graphs.overwriting(graphs.layered(1), 1)
    problem = problem.with_budget(int(0.8 * graphs.peak(problem)))
    try:
        with after(looks):
            found = solve(problem, time_limit_s=0.3)
    except InfeasibleBudget as error:
        assert error.min_budget > problem.budget_bytes
        return
    assert found.schedule is not None
    assert validate(problem, found.schedule) <= problem.budget_bytes


def long_chain(length: int) -> Problem:
    problem = synthetic.chain(length)
    return problem.with_budget(simulate(problem, plain_schedule(problem.graph)).peak_bytes // 2)


def test_large_graph_has_a_schedule_that_fits_at_the_time_limit() -> None:
    problem = long_chain(5_000)
    start = time.process_time()
    found = solve(problem, time_limit_s=1.0)
    assert found.schedule is not None
    # Of the processor alone: the machine may have other things to do.
    assert time.process_time() - start < hard_limit_s(problem, 1.0) + 2.0


@pytest.mark.parametrize("name", ["dtr", "tree_dp", "milp"])
def test_solver_of_a_large_graph_keeps_its_time(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "sys"))
    problem = long_chain(10_000)
    start = time.process_time()
    try:
        solve(problem, name, time_limit_s=0.0)
    except InfeasibleBudget as error:
        assert error.min_budget > problem.budget_bytes
    # Beside others on a busy machine it takes twice as long as alone.
    assert time.process_time() - start < 10.0


def test_stages_of_a_large_graph_are_refused_before_they_are_made() -> None:
    chain = flatten(long_chain(10_000))
    tracemalloc.start()
    try:
        assert make_stages(chain, most=120_000) is None
        # Half of the 10,000² pairs of a stage and an op would be 400 MB.
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(8))
def test_schedule_made_at_once_is_the_one_made_step_by_step(seed: int) -> None:
    problem = graphs.squeezed(graphs.layered(seed), 0.6)
    grown = EditableSchedule(problem)
    count_ = grown.flat.count
    for stage in range(2, count_, 3):
        for number in range(0, stage - 1, 4):
            if grown.flat.recomputable[number]:
                grown.insert(stage * count_ + number)
    made = EditableSchedule(problem, grown.extra_steps())
    assert made.keys.tolist() == grown.keys.tolist()
    assert made.load.tolist() == grown.load.tolist()
    assert (made.uses, made.computes) == (grown.uses, grown.computes)
    assert made.extra_time == pytest.approx(grown.extra_time)
