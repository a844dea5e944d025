"""The rounds of planning: a schedule that needs more than the solver knew is planned again, and that ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.core.memory_rules import CUDA
from remat.core.schedule import Schedule, plain_schedule
from remat.core.solution import Solution
from remat.errors import InfeasibleBudget
from remat.solvers import solve
from remat.solvers.sweep import plain_peak_bytes
from remat.within import LeanestSeen, _fitted
from remat.zoo.synthetic import chain

PROBLEM = chain(24)


def test_schedule_that_always_needs_too_much_ends_in_few_rounds() -> None:
    problem = PROBLEM.with_budget(plain_peak_bytes(PROBLEM) - 1)
    rounds: list[tuple[int, float]] = []

    def attempt(reserve: int, time_share: float) -> Solution:
        rounds.append((reserve, time_share))
        return solve(problem.with_budget(problem.budget_bytes - reserve), "auto", time_limit_s=time_share)

    # Whatever is found, the ops run in the plain order, which is one byte too much.
    with pytest.raises(InfeasibleBudget):
        _fitted(problem, attempt, lambda _: plain_schedule(problem.graph), lambda *_: 0)
    assert [share for _, share in rounds[:4]] == [1, 1, 0.5, 0.25]
    assert [reserve for reserve, _ in rounds[:4]] == [0, 1, 3, 7]
    assert len(rounds) <= 2 + problem.budget_bytes.bit_length()


def test_what_the_allocator_takes_beside_stays_within_the_budget() -> None:
    large = replace(PROBLEM.costs, size_bytes=tuple(size + (3 << 20) for size in PROBLEM.costs.size_bytes))
    problem = replace(PROBLEM, costs=large)
    problem = problem.with_budget(int(0.85 * plain_peak_bytes(problem)))

    def attempt(reserve: int, time_share: float) -> Solution:
        return solve(problem.with_budget(problem.budget_bytes - reserve), "auto", time_limit_s=time_share)

    found = _fitted(problem, attempt, None, lambda schedule, _: CUDA.slack_bytes(problem, schedule))
    assert found.slack_bytes > 0
    assert found.solution.peak_bytes + found.slack_bytes <= problem.budget_bytes


def test_step_as_it_is_counts_where_everything_leaner_needs_more() -> None:
    """As where a kept graph holds what was computed again as well."""
    problem = PROBLEM.with_budget(plain_peak_bytes(PROBLEM))
    plain = plain_schedule(problem.graph)
    longer = replace(solve(problem, "auto"), schedule=twice_first(plain))

    def attempt(reserve: int, time_share: float) -> Solution:
        if reserve > 1000:
            raise InfeasibleBudget("Nothing is that small.", min_budget=problem.budget_bytes + 5000)
        return longer

    def more_unless_plain(schedule: Schedule, peak: int) -> int:
        return 0 if schedule == plain else problem.budget_bytes - peak + 100

    found = _fitted(problem, attempt, None, more_unless_plain)
    assert found.solution.schedule == plain
    assert found.solution.time_ns == found.solution.bound_ns == problem.base_time_ns
    smaller = problem.with_budget(problem.budget_bytes - 1)
    with pytest.raises(InfeasibleBudget) as refused:
        _fitted(smaller, attempt, None, more_unless_plain)
    assert refused.value.min_budget == problem.budget_bytes


def test_what_was_named_as_enough_is_enough_though_no_search_finds_it_again() -> None:
    problem = PROBLEM.with_budget(plain_peak_bytes(PROBLEM) // 2)
    lean = solve(problem, "auto", time_limit_s=1)
    seen, can_find = LeanestSeen(), True

    def attempt(reserve: int, time_share: float) -> Solution:
        if reserve == 0 or not can_find:
            raise InfeasibleBudget("Not in this time.", min_budget=problem.budget_bytes)
        return lean

    too_small = problem.with_budget(lean.peak_bytes - 1)
    with pytest.raises(InfeasibleBudget) as refused:
        _fitted(too_small, attempt, None, lambda *_: 0, seen=seen)
    assert refused.value.min_budget == lean.peak_bytes
    can_find = False
    found = _fitted(problem.with_budget(refused.value.min_budget), attempt, None, lambda *_: 0, seen=seen)
    assert found.solution.schedule == lean.schedule
    assert found.solution.time_ns == lean.time_ns


def twice_first(schedule: Schedule) -> Schedule:
    return Schedule((schedule.steps[0], *schedule.steps))
