"""What fits is found without a search, however little time there is."""

from __future__ import annotations

import pytest
from tests.contract import graphs

from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import plain_schedule
from remat.core.search.deadline import OutOfTime, check_time, unhurried, within
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.errors import InfeasibleBudget
from remat.solvers import solve
from remat.solvers.search.certain import _Forward, certain_schedules
from remat.zoo.recorder import Builder
from remat.zoo.synthetic import GENERATORS


def plain_peak(problem: Problem) -> int:
    return simulate(problem, plain_schedule(problem.graph)).peak_bytes


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("kind", ["recurrence", "chain"])
def test_long_chain_is_solved_where_there_is_no_time_at_all(kind: str, share: float) -> None:
    problem = GENERATORS[kind](100)
    allowed = floor_bytes(problem)[0] + int(share * plain_peak(problem))
    with within(-1.0):
        found = [solve(problem.with_budget(allowed), time_limit_s=0.0) for _ in range(2)]
    assert found[0].peak_bytes <= allowed and found[0].schedule == found[1].schedule
    assert found[0].time_ns <= 1.5 * problem.base_time_ns, "forward runs twice at most"


def test_refusal_without_time_names_a_budget_that_is_enough_without_time() -> None:
    problem = GENERATORS["recurrence"](60)
    with within(-1.0):
        with pytest.raises(InfeasibleBudget) as refused:
            solve(problem.with_budget(floor_bytes(problem)[0] + 1), time_limit_s=0.0)
        named = refused.value.min_budget
        assert named < 0.2 * plain_peak(problem)
        assert solve(problem.with_budget(named), time_limit_s=0.0).peak_bytes <= named


@pytest.mark.parametrize("seed", range(20))
def test_schedules_are_valid_for_any_graph(seed: int) -> None:
    problem = graphs.overwriting(graphs.layered(seed), seed)
    for schedule in certain_schedules(problem):
        validate(problem.with_budget(2**62), schedule)


def test_a_stretch_is_cut_into_no_more_parts_than_it_has_places() -> None:
    """Nothing crosses between ops that read no other: as many cuts as there are bytes would be free."""
    build = Builder()
    values = [build.add(f"forward{number}", [], [2**30], 1)[0] for number in range(50)]
    gradients = [build.add("backward", [value], [4], 1, backward=True)[0] for value in reversed(values)]
    problem = build.problem(gradients, "apart", 0)
    forward = _Forward(problem)
    assert len(list(forward._cut(0, forward.turn, 10**9))) < forward.turn
    for schedule in certain_schedules(problem):
        validate(problem.with_budget(2**62), schedule)


def test_nothing_is_hurried_by_a_limit_around_it() -> None:
    with within(-1.0):
        with unhurried():
            check_time()
        with pytest.raises(OutOfTime):
            check_time()
