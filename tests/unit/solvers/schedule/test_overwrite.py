"""Overwriting counts in the peak of a schedule, and nothing more is proven than holds with it."""

from __future__ import annotations

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import Problem, floor_bytes, plain_schedule, simulate, validate
from remat.core.eager import without_overwrites
from remat.core.simulate import NO_VALUE
from remat.errors import InfeasibleBudget, MissingExtra
from remat.solvers import REGISTRY, min_budget, solve
from remat.solvers.exact.shortest_path import shortest_schedule
from remat.solvers.schedule.overwrite import always_overwritten


def activations(length: int = 3) -> Problem:
    """f, relu, f, relu, …: only each relu's output is read again."""
    build = graphs.Builder()
    value = build.add("input", [], [10], 1)[0]
    saved = []
    for number in range(length):
        wide = build.add(f"linear{number}", [value], [10], 5)[0]
        value = build.add(f"relu{number}", [wide], [10], 1)[0]
        saved.append((wide, value))
    outputs = build.add("loss", [*(value for _, value in saved)], [1], 1, backward=True)
    problem = build.problem(outputs)
    ops = list(problem.graph.ops)
    for number, op in enumerate(ops):
        if op.name.startswith("relu"):
            ops[number] = graphs.replace(op, overwrites=op.inputs)
    return graphs.replace(problem, graph=graphs.replace(problem.graph, ops=tuple(ops)))


def test_output_takes_the_place_of_a_dying_input() -> None:
    problem = activations()
    timeline = simulate(problem, plain_schedule(problem.graph))
    taken = [problem.graph.ops[step].name for step, value in enumerate(timeline.overwritten) if value != NO_VALUE]
    assert taken == ["relu0", "relu1", "relu2"]
    plain = simulate(without_overwrites(problem), plain_schedule(problem.graph))
    assert timeline.live_bytes[6] == plain.live_bytes[6] - 10


def test_input_that_is_read_later_is_not_overwritten() -> None:
    problem = activations(1)
    steps = plain_schedule(problem.graph).steps
    again = graphs.replace(plain_schedule(problem.graph), steps=(*steps[:3], steps[2], *steps[3:]))
    assert simulate(problem, again).overwritten == (NO_VALUE, NO_VALUE, NO_VALUE, 1, NO_VALUE)


def test_every_problem_is_no_harder_where_all_is_overwritten() -> None:
    for seed in range(20):
        problem = graphs.overwriting(graphs.layered(seed), seed)
        schedule = plain_schedule(problem.graph)
        relaxed = simulate(always_overwritten(problem), schedule).peak_bytes
        assert relaxed <= simulate(problem, schedule).peak_bytes
        assert simulate(problem, schedule).peak_bytes <= simulate(without_overwrites(problem), schedule).peak_bytes


def budgets(problem: Problem) -> list[int]:
    """From the need of the largest op to just below the plain peak."""
    low, high = floor_bytes(problem)[0], graphs.peak(problem)
    return sorted({low, low + 1, (low + high) // 2, high - 1} & set(range(low, high)))


@pytest.mark.parametrize("seed", range(40))
def test_answers_agree_with_brute_force(seed: int) -> None:
    """Some of these need a value again that was overwritten, which the relaxation knows nothing of."""
    problem = graphs.overwriting(graphs.tiny(seed), seed)
    for budget in budgets(problem):
        limited = problem.with_budget(budget)
        best = best_time(limited)
        try:
            found = solve(limited, time_limit_s=20.0, gap=0.0)
        except InfeasibleBudget as error:
            assert best is None
            assert error.min_budget > budget
            assert best_time(problem.with_budget(error.min_budget)) is not None
            continue
        assert found.schedule is not None
        assert validate(limited, found.schedule) == found.peak_bytes
        assert best is not None
        assert found.bound_ns <= best + 1e-6
        assert found.time_ns == pytest.approx(best)


@pytest.mark.parametrize("seed", range(6))
def test_auto_accepts_the_smallest_budget_it_names(seed: int) -> None:
    problem = graphs.overwriting(graphs.layered(seed), seed)
    smallest = min_budget(problem)
    assert solve(problem.with_budget(smallest), time_limit_s=2.0).peak_bytes <= smallest


@pytest.mark.parametrize("seed", range(30))
def test_shortest_path_overwrites_or_not_as_is_best(seed: int) -> None:
    problem = graphs.overwriting(graphs.tiny(seed + 100), seed)
    for budget in budgets(problem):
        found = shortest_schedule(problem.with_budget(budget), float("inf"))
        best = best_time(problem.with_budget(budget))
        assert found.complete
        assert (found.schedule is None) == (best is None)
        if found.schedule is not None:
            assert validate(problem.with_budget(budget), found.schedule) <= budget
            assert simulate(problem, found.schedule).time_ns == pytest.approx(best)


@pytest.mark.parametrize("solver", REGISTRY, ids=lambda solver: solver.name)
@pytest.mark.parametrize("seed", range(3))
def test_every_solver_keeps_the_budget(solver, seed: int) -> None:
    problem = graphs.overwriting(graphs.layered(seed), seed)
    problem = problem.with_budget(int(0.8 * graphs.peak(problem)))
    try:
        found = solve(problem, solver, time_limit_s=1.0)
    except MissingExtra:
        pytest.skip("its library is not installed")
    except InfeasibleBudget:
        return
    assert found.schedule is not None
    assert simulate(problem, found.schedule).peak_bytes == found.peak_bytes <= problem.budget_bytes
