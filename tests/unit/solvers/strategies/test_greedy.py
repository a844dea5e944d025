"""Greedy strategies and online eviction: what each prefers, and what it never does."""

from __future__ import annotations

import pytest
from tests.contract import graphs

from remat.core import simulate, validate
from remat.core.search.limits import Limits
from remat.solvers import get_solver
from remat.solvers.schedule.activations import activations_of
from remat.solvers.schedule.climb import climb
from remat.solvers.schedule.editable import flatten
from remat.solvers.strategies.critical_path import critical_ops
from remat.solvers.strategies.dtr import Cost, Dtr, run_online
from remat.solvers.strategies.mu_two import idle_times, pick_order


def names(problem, ops) -> list[str]:  # type: ignore[no-untyped-def]
    return [problem.graph.ops[op].name for op in ops]


def with_sources():  # type: ignore[no-untyped-def]
    """`second` is cheaper than `other` as long as `first` is there; all idle about as long."""
    build = graphs.Builder()
    first = build.add("first", [], [10], 10)[0]
    second = build.add("second", [first], [10], 40)[0]
    other = build.add("other", [], [10], 45)[0]
    build.add("wait", [], [0], 10_000)
    gradient = build.add("loss", [], [1], 1, backward=True)[0]
    for value in (other, second, first):
        gradient = build.add("gradient", [value, gradient], [1], 1, backward=True)[0]
    return build.problem([gradient])


def test_mu_two_counts_the_sources_of_what_was_picked_before() -> None:
    problem = with_sources()
    found = activations_of(problem)
    assert found.again_time(1, found.present(())) == 40
    assert found.again_time(1, found.present([0])) == 50
    assert names(problem, pick_order(found)) == ["first", "other", "second"]


def test_mu_two_idles_from_the_last_forward_use_to_the_first_in_backward() -> None:
    assert idle_times(activations_of(with_sources())) == {0: 10_048, 1: 10_047, 2: 10_001}


def side_by_side(times: list[float]):  # type: ignore[no-untyped-def]
    """Values of ten bytes, each read by a gradient of its own; one of them has to go."""
    build = graphs.Builder()
    values = [build.add(f"takes{time}", [], [10], time)[0] for time in times]
    build.add("wait", [], [0], 100)
    gradient = build.add("loss", [], [1], 1, backward=True)[0]
    for value in reversed(values):
        gradient = build.add("gradient", [value, gradient], [1], 1, backward=True)[0]
    problem = build.problem([gradient])
    return problem.with_budget(graphs.peak(problem) - 5)


def test_benefit_cost_drops_the_most_bytes_per_second_first() -> None:
    problem = side_by_side([7, 3, 9, 50])
    solution = get_solver("benefit_cost").solve(problem, Limits(9.0))
    assert solution.schedule is not None
    assert names(problem, solution.schedule.recomputed()) == ["takes3"]


def test_critical_path_is_spared_even_where_it_is_cheapest() -> None:
    build = graphs.Builder()
    start = build.add("start", [], [10], 1)[0]
    long = build.add("long", [start], [10], 90)[0]
    beside = build.add("beside", [], [10], 5)[0]
    gradient = build.add("loss", [], [1], 1, workspace=20, backward=True)[0]
    for value in (long, beside, start):
        gradient = build.add("gradient", [value, gradient], [1], 1, backward=True)[0]
    problem = build.problem([gradient])
    problem = problem.with_budget(graphs.peak(problem) - 5)
    for name, dropped in (("critical_path", "beside"), ("benefit_cost", "start")):
        solution = get_solver(name).solve(problem, Limits(9.0))
        assert solution.schedule is not None
        assert names(problem, solution.schedule.recomputed()) == [dropped]


def test_critical_path_is_the_longest_chain_by_time() -> None:
    build = graphs.Builder()
    start = build.add("start", [], [1], 1)[0]
    short = build.add("short", [start], [1], 2)[0]
    long = build.add("long", [start], [1], 3)[0]
    build.add("join", [short, long], [1], 1)
    problem = build.problem([3])
    assert names(problem, sorted(critical_ops(flatten(problem), 4))) == ["start", "long", "join"]
    assert critical_ops(flatten(problem), 0) == set()


def test_pressure_leaves_what_is_idle_elsewhere_alone() -> None:
    problem = graphs.squeezed(graphs.transformer(6), 0.9)
    everywhere = get_solver("full").solve(problem, Limits(9.0))
    at_peak = get_solver("pressure").solve(problem, Limits(9.0))
    assert at_peak.schedule is not None and everywhere.schedule is not None
    assert len(at_peak.schedule.steps) < len(everywhere.schedule.steps)


@pytest.mark.parametrize("cost", Cost)
@pytest.mark.parametrize("seed", range(12))
def test_dtr_never_exceeds_its_limit(seed: int, cost: Cost) -> None:
    problem = graphs.layered(seed)
    for share in (0.95, 0.8, 0.65):
        limited = graphs.squeezed(problem, share)
        schedule = run_online(flatten(limited), limited.budget_bytes, cost)
        if schedule is not None:
            assert validate(limited, schedule) <= limited.budget_bytes


def test_dtr_evicts_what_is_cheap_for_its_bytes_and_long_unused() -> None:
    build = graphs.Builder()
    cheap = build.add("cheap", [], [10], 1)[0]
    dear = build.add("dear", [], [10], 100)[0]
    more = build.add("more", [], [10], 1)[0]
    build.add("use", [dear, more], [0], 1)
    build.add("late", [cheap], [0], 1)
    problem = build.problem([])
    schedule = run_online(flatten(problem), 20, Cost.LOCAL)
    assert schedule is not None
    assert names(problem, schedule.steps) == ["cheap", "dear", "more", "use", "cheap", "late"]
    assert run_online(flatten(problem), 19, Cost.LOCAL) is None


def test_dtr_counts_evicted_neighbours_only_where_asked() -> None:
    problem = graphs.squeezed(graphs.chain(30), 0.4)
    local, around = (Dtr(cost=cost).solve(problem, Limits(9.0)) for cost in (Cost.LOCAL, Cost.NEIGHBOURHOOD))
    assert local.schedule != around.schedule


def test_climb_finds_the_last_setting_that_fits() -> None:
    build = graphs.Builder()
    values = [build.add("layer", [], [10], 1)[0] for _ in range(40)]
    gradient = build.add("loss", [], [1], 1, backward=True)[0]
    for value in reversed(values):
        gradient = build.add("gradient", [value, gradient], [1], 1, backward=True)[0]
    problem = graphs.squeezed(build.problem([gradient]), 0.6)
    found, tried = activations_of(problem), []
    settings = range(len(found.ops), -1, -1)
    for schedule in climb(problem, settings, lambda length: found.schedule(found.ops[:length])):
        tried.append(simulate(problem, schedule).peak_bytes)
    assert problem.budget_bytes - 10 < max(peak for peak in tried if peak <= problem.budget_bytes)
    assert len(tried) < len(settings) / 2
