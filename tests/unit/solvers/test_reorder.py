from __future__ import annotations

import itertools

import pytest
from tests.contract import graphs
from tests.contract.brute_force import best_time

from remat.core import Problem, Status, validate
from remat.core.search.limits import Limits
from remat.errors import InvalidSchedule
from remat.solvers import solve
from remat.solvers.reorder import any_order_bound
from remat.solvers.schedule.order import lower_order, reordered


def late_weight_gradients() -> Problem:
    """Backward reads every activation at once, then all weight gradients follow: each could come much earlier."""
    build = graphs.Builder()
    values = [build.add("input", [], [10], 1)[0]]
    for number in range(4):
        values += build.add(f"layer{number}", [values[-1]], [10], 1)
    gradients = build.add("loss", [values[-1]], [10], 1, backward=True)
    for number in range(4):
        gradients += build.add(f"backward{number}", [gradients[-1]], [10], 1, backward=True)
    weights = [
        build.add(f"weight{number}", [values[3 - number], gradients[number]], [1], 1, backward=True)[0]
        for number in range(4)
    ]
    return build.problem(weights)


def topological_orders(problem: Problem) -> list[tuple[int, ...]]:
    producers = problem.graph.producers()
    needs = [{producers[value] for value in op.inputs} for op in problem.graph.ops]
    orders = itertools.permutations(range(len(needs)))
    return [order for order in orders if all(needs[op] <= set(order[:at]) for at, op in enumerate(order))]


def test_moves_weight_gradients_earlier() -> None:
    problem = late_weight_gradients()
    order = lower_order(problem)
    assert order[:5] == (0, 1, 2, 3, 4)
    assert sorted(order) == list(range(len(problem.graph.ops)))
    assert graphs.peak(reordered(problem, order)) < graphs.peak(problem)


def test_fits_without_recomputing_what_the_given_order_must_recompute() -> None:
    problem = late_weight_gradients()
    tight = problem.with_budget(graphs.peak(reordered(problem, lower_order(problem))))
    plain, moved = solve(tight), solve(tight, reorder=True)
    assert plain.time_ns > moved.time_ns == problem.base_time_ns
    assert moved.status is Status.OPTIMAL
    assert moved.schedule is not None
    validate(tight, moved.schedule, keep_order=False)
    with pytest.raises(InvalidSchedule, match="out of the graph's order"):
        validate(tight, moved.schedule)


@pytest.mark.parametrize("seed", range(20))
def test_bound_holds_for_every_order(seed: int) -> None:
    pytest.importorskip("highspy")
    problem = graphs.squeezed(graphs.tiny(seed, 5), 0.75)
    bound = any_order_bound(problem, Limits(5.0))
    times = (best_time(reordered(problem, order)) for order in topological_orders(problem))
    assert all(found is None or bound <= found + 1e-6 for found in times)


@pytest.mark.parametrize("seed", range(20))
def test_keeps_the_order_of_forward_and_of_ops_that_run_once(seed: int) -> None:
    problem = graphs.tiny(seed, 12)
    order = lower_order(problem)
    forward = [number for number, op in enumerate(problem.graph.ops) if not op.backward]
    once = [number for number, op in enumerate(problem.graph.ops) if not op.recomputable]
    assert list(order[: len(forward)]) == forward
    assert [number for number in order if number in once] == once
