"""The curve of time against memory: within every budget, never slower with more memory, bounds that carry downwards."""

from __future__ import annotations

import pytest

from remat.core.memory_rules import CPU
from remat.core.problem import Problem, floor_bytes
from remat.core.solution import Solution
from remat.core.validate import validate
from remat.errors import InfeasibleBudget
from remat.solvers import get_solver
from remat.solvers.base import Solver
from remat.solvers.frontier import BASELINES, Candidate, Curve, has_one_schedule, lowest_candidate
from remat.solvers.sweep import even_budgets, plain_peak_bytes
from remat.within import solve_within
from remat.zoo.synthetic import chain, unet_like

PROBLEMS = {"chain": chain(10), "unet": unet_like(3)}


def attempt(problem: Problem, solver: Solver) -> tuple[Solution, int]:
    return solve_within(problem, solver, rules=CPU, time_limit_s=0.3)


def curve_of(problem: Problem, others: tuple[str, ...] = BASELINES) -> tuple[Curve, list[Candidate]]:
    lowest = lowest_candidate(problem, "auto", lambda *_: 0)
    budgets = even_budgets(plain_peak_bytes(problem), lowest.peak_bytes, 6)
    curve = Curve(problem, budgets, get_solver("auto"), tuple(map(get_solver, others)), attempt)
    return curve, [lowest, *(item for item in curve.trace() if item is not None)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_points_are_monotone_within_budget_and_above_their_bound(name: str) -> None:
    problem = PROBLEMS[name]
    curve, found = curve_of(problem)
    points = [point for point, _ in curve.points(found)]
    assert [point.budget_bytes for point in points] == list(curve.budgets)
    for point, candidate in curve.points(found):
        assert candidate.solution.schedule is not None
        assert validate(problem, candidate.solution.schedule) == point.peak_bytes <= point.budget_bytes
        assert problem.base_time_ns <= point.bound_ns <= point.time_ns
    for larger, smaller in zip(points, points[1:], strict=False):
        assert smaller.time_ns >= larger.time_ns
        assert smaller.bound_ns >= larger.bound_ns
    assert points[0].time_ns == problem.base_time_ns
    assert points[-1].budget_bytes >= floor_bytes(problem)[0]


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_baseline_beats_the_curve_at_its_budget_nor_the_bound_at_its_peak(name: str) -> None:
    curve, found = curve_of(PROBLEMS[name])
    points = [point for point, _ in curve.points(found)]
    for other, _ in curve.baselines(found):
        assert other.time_ns >= other.bound_ns
        at_least = [point for point in points if point.budget_bytes >= other.peak_bytes]
        assert all(point.time_ns <= other.time_ns for point in at_least)


def test_strategies_with_one_schedule_come_once() -> None:
    curve, found = curve_of(PROBLEMS["chain"])
    names = [item.solver for item in found]
    assert [name for name in BASELINES if has_one_schedule(get_solver(name))] == ["none", "full", "sqrt_n", "selective"]
    assert (names.count("none"), names.count("sqrt_n")) == (1, 1)
    assert len(list(curve.tasks())) == 4 + len(curve.budgets) * 4


def test_schedule_of_a_small_budget_serves_the_larger_ones_where_a_solve_failed() -> None:
    problem = PROBLEMS["chain"]
    lowest = lowest_candidate(problem, "auto", lambda *_: 0)

    def fails(problem: Problem, solver: Solver) -> tuple[Solution, int]:
        raise InfeasibleBudget("out of time", 0)

    curve = Curve(problem, (2 * lowest.peak_bytes, lowest.peak_bytes), get_solver("auto"), (), fails)
    assert list(curve.trace()) == [None, None]
    assert [point.time_ns for point, _ in curve.points([lowest])] == [lowest.solution.time_ns] * 2


def test_settled_schedule_is_not_looked_for_again() -> None:
    problem = PROBLEMS["chain"]
    asked: list[int] = []

    def note(problem: Problem, solver: Solver) -> tuple[Solution, int]:
        asked.append(problem.budget_bytes)
        return attempt(problem, solver)

    plain = plain_peak_bytes(problem)
    curve = Curve(problem, (3 * plain, 2 * plain, plain), get_solver("auto"), (), note)
    found = [item for item in curve.trace() if item is not None]
    assert asked == [3 * plain]
    assert len(curve.points(found)) == 3


def test_what_the_allocator_takes_counts_as_peak() -> None:
    lowest = lowest_candidate(PROBLEMS["chain"], "auto", lambda *_: 7)
    assert lowest.peak_bytes == lowest.solution.peak_bytes + 7 == lowest.budget_bytes
