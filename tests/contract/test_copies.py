"""Schedules with copies to the host, against brute force on small problems."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product

import pytest
from tests.contract.brute_force_copies import best_time_with_copies
from tests.contract.graphs import chain, layered

from remat.core import Problem, Status, ValueId, floor_bytes, plain_schedule, simulate, validate
from remat.core.copies import Link, with_copies, without_copies
from remat.core.search.limits import Limits
from remat.core.validate import naive_time_ns
from remat.errors import InfeasibleBudget
from remat.solvers import solve
from remat.solvers.exact.copy_cuts import bound_with_copies
from remat.solvers.exact.copy_refinement import refine
from remat.zoo.recorder import Builder


def tiny(seed: int) -> Problem:
    """A few layers whose gradients read what they computed, within a budget between the floor and the plain peak."""
    rng = random.Random(seed)
    build = Builder()
    values = [build.add("input", [], [2 * rng.randint(1, 4)], 1, recomputable=rng.random() < 0.5)[0]]
    count = rng.choice((1, 2, 2, 3))
    for layer in range(count):
        values += build.add(f"layer{layer}", [values[-1]], [2 * rng.randint(1, 6)], rng.randint(1, 6))
    gradient = build.add("loss", [values[-1]], [2], 1, backward=True)[0]
    for layer in reversed(range(count)):
        reads = [gradient, values[layer], *([values[layer + 1]] if rng.random() < 0.5 else [])]
        gradient = build.add(f"back{layer}", reads, [2 * rng.randint(1, 4)], rng.randint(1, 8), backward=True)[0]
    problem = build.problem([gradient])
    low, high = floor_bytes(problem)[0], simulate(problem, plain_schedule(problem.graph)).peak_bytes
    return moving(problem.with_budget(low + rng.randint(0, max(0, high - low - 1))), rng, most=3)


def moving(problem: Problem, rng: random.Random, most: int = 99) -> Problem:
    """Some values may leave; copies take whole times for even sizes."""
    link = Link(rng.choice((0.5, 1, 2)), rng.choice((0.5, 1, 2)))
    inside = [v for v in range(problem.graph.value_count) if v not in problem.graph.outputs]
    inside = sorted(rng.sample(inside, min(most, len(inside))))
    return with_copies(problem, [link.movable(ValueId(v), problem.costs.size_bytes[v]) for v in inside])


def check(seed: int) -> None:
    problem = tiny(seed)
    best = best_time_with_copies(problem)
    if best is None:
        with pytest.raises(InfeasibleBudget):
            solve(problem, time_limit_s=2.0)
        return
    found = solve(problem, time_limit_s=2.0)
    assert found.schedule is not None
    assert found.time_ns == pytest.approx(best), seed
    assert found.bound_ns <= best * (1 + 1e-9)
    assert naive_time_ns(problem, found.schedule) == pytest.approx(found.time_ns)
    assert validate(problem, found.schedule) == found.peak_bytes


QUICK = (1, 3, 5, 6, 10, 13, 15, 17, 19, 20, 23, 24)
"""Those for which brute force takes less than a second."""


@pytest.mark.parametrize("seed", QUICK)
def test_brute_force_finds_nothing_faster(seed: int) -> None:
    check(seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_brute_force_finds_nothing_faster_in_five_hundred_problems(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)


@pytest.mark.parametrize("problem", [chain(12), layered(3)], ids=["chain", "layered"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_copies_never_make_a_schedule_slower(problem: Problem, share: float) -> None:
    low, high = floor_bytes(problem)[0], simulate(problem, plain_schedule(problem.graph)).peak_bytes
    problem = problem.with_budget(int(low + share * (high - low)))
    with_link = moving(problem, random.Random(0))
    found = solve(with_link, time_limit_s=2.0)
    assert found.schedule is not None
    validate(with_link, found.schedule)
    try:
        alone = solve(without_copies(with_link), time_limit_s=2.0)
    except InfeasibleBudget:
        return
    assert found.time_ns <= alone.time_ns


@pytest.mark.parametrize(
    ("solver", "seed"), [*product(("mu_two", "milp"), QUICK[:6]), *(("cp_sat", seed) for seed in QUICK[:3])]
)
def test_solvers_that_choose_copies_are_within_brute_force_and_recomputing(solver: str, seed: int) -> None:
    problem = tiny(seed)
    best = best_time_with_copies(problem)
    try:
        found = solve(problem, solver, time_limit_s=2.0)
    except InfeasibleBudget:
        with pytest.raises(InfeasibleBudget):
            solve(without_copies(problem), solver, time_limit_s=2.0)
        return
    assert best is not None and found.schedule is not None
    assert found.bound_ns <= best * (1 + 1e-9)
    assert best <= found.time_ns * (1 + 1e-9)
    assert validate(problem, found.schedule) <= problem.budget_bytes
    with suppress(InfeasibleBudget):
        assert found.time_ns <= solve(without_copies(problem), solver, time_limit_s=2.0).time_ns


def test_the_program_with_copies_proves_most_tiny_problems_optimal() -> None:
    proven = 0
    for seed in QUICK:
        with suppress(InfeasibleBudget):
            found = solve(tiny(seed), "milp", time_limit_s=2.0)
            proven += found.status is Status.OPTIMAL
    assert proven >= len(QUICK) // 2


@pytest.mark.parametrize("seed", QUICK)
def test_more_cuts_prove_nothing_that_brute_force_beats(seed: int) -> None:
    problem, limits = tiny(seed), Limits(2.0)
    best = best_time_with_copies(problem)
    start = bound_with_copies(problem, limits, lambda: False)
    if best is None or start.cut < 0:
        pytest.skip("this problem has no schedule, or no cut")
    for found in refine(problem, start, limits, lambda: False):
        assert problem.base_time_ns + found.extra_time <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", [33, *(pytest.param(seed, marks=pytest.mark.long) for seed in QUICK)])
def test_constraints_with_copies_find_the_optimum_of_tiny_problems(seed: int) -> None:
    problem = tiny(seed)
    found = solve(problem, "cp_sat", time_limit_s=6.0)
    assert found.schedule is not None
    assert found.time_ns == pytest.approx(best_time_with_copies(problem))
    assert naive_time_ns(problem, found.schedule) == pytest.approx(found.time_ns)
    assert validate(problem, found.schedule) <= problem.budget_bytes


def test_what_is_idle_for_long_is_swapped_for_nothing_on_a_fast_link() -> None:
    problem = chain(16)
    high = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    fast = moving(problem.with_budget(int(0.7 * high)), random.Random(0))
    found = solve(fast, "mu_two", time_limit_s=2.0)
    alone = solve(without_copies(fast), "mu_two", time_limit_s=2.0)
    assert found.schedule is not None and found.time_ns < alone.time_ns
    assert found.reason == "Values are copied to the host."


def test_a_solver_that_knows_no_copies_says_so() -> None:
    problem = chain(16)
    high = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    found = solve(moving(problem.with_budget(int(0.7 * high)), random.Random(0)), "sqrt_n", time_limit_s=2.0)
    assert "`sqrt_n` knows no copies: others chose them." in found.reason
