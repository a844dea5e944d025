"""The smallest peak within a time: fast enough, leaner with more tries, and calm where nothing is found."""

from __future__ import annotations

from functools import cache

import pytest

from remat.core.memory_rules import CPU
from remat.core.problem import LARGEST_BYTES, Problem, floor_bytes
from remat.core.solution import Solution
from remat.solvers import get_solver
from remat.solvers.base import Solver
from remat.solvers.frontier import Candidate, candidate_at, lowest_candidate
from remat.solvers.leanest import find_leanest, leanest
from remat.within import solve_within
from remat.zoo.synthetic import chain, unet_like

PROBLEMS = {"chain": chain(8), "unet": unet_like(2)}


# Once for each budget: a second solve could end elsewhere where its time is up earlier.
@cache
def attempt(problem: Problem, solver: Solver) -> tuple[Solution, int]:
    return solve_within(problem, solver, rules=CPU, time_limit_s=0.1)


@cache
def known_of(name: str) -> tuple[Candidate, Candidate]:
    """The plain schedule, and the one with the smallest peak."""
    plain = candidate_at(PROBLEMS[name], LARGEST_BYTES, get_solver("none"), attempt)
    assert plain is not None
    return plain, lowest_candidate(PROBLEMS[name], "auto", lambda *_: 0)


def find(name: str, limit: float, rounds: int) -> Candidate:
    problem = PROBLEMS[name]
    found = find_leanest(
        known_of(name),
        (1 + limit) * problem.base_time_ns,
        lambda budget: candidate_at(problem, budget, get_solver("auto"), attempt),
        floor_bytes=floor_bytes(problem)[0],
        rounds=rounds,
    )
    assert found is not None
    return found


@pytest.mark.parametrize("name", PROBLEMS)
def test_keeps_within_the_time_and_saves_more_with_more_tries(name: str) -> None:
    problem = PROBLEMS[name]
    found = [find(name, 0.25, rounds) for rounds in (0, 2, 5)]
    assert all(item.solution.time_ns <= 1.25 * problem.base_time_ns for item in found)
    assert found[2].peak_bytes <= found[1].peak_bytes <= found[0].peak_bytes
    assert found[2].peak_bytes < found[0].peak_bytes


@pytest.mark.parametrize("name", PROBLEMS)
def test_all_the_time_in_the_world_gives_the_smallest_peak(name: str) -> None:
    assert find(name, 1e9, 2).peak_bytes == known_of(name)[1].peak_bytes


def test_budgets_that_nothing_fits_are_not_tried_twice() -> None:
    problem, tried = PROBLEMS["chain"], list[int]()

    def refuse(budget: int) -> None:
        tried.append(budget)

    plain = known_of("chain")[:1]
    assert find_leanest(plain, LARGEST_BYTES, refuse, floor_bytes=floor_bytes(problem)[0], rounds=5) is plain[0]
    assert tried == sorted(set(tried))


def test_nothing_is_found_where_nothing_is_fast_enough() -> None:
    problem = PROBLEMS["chain"]
    assert leanest(known_of("chain"), 0.5 * problem.base_time_ns) is None
    assert find_leanest(known_of("chain"), 0.0, lambda budget: None, floor_bytes=0, rounds=3) is None
