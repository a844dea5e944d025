"""Ops are moved where that lowers the peak, and only as far as a program could run them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.contract import graphs

from remat.core import Problem, Schedule, validate
from remat.core.graph import OpId
from remat.core.simulate import simulate
from remat.solvers import solve
from remat.solvers.schedule.order import order_ops, reordered, translated


def peak(problem: Problem, order: tuple[int, ...]) -> int:
    return simulate(problem, Schedule(tuple(map(OpId, order)))).peak_bytes


@pytest.mark.parametrize("seed", range(30))
def test_figures_are_those_of_the_orders(seed: int) -> None:
    problem = graphs.overwriting(graphs.layered(seed), seed)
    found = order_ops(problem)
    assert found == order_ops(problem)
    assert found.before_bytes == peak(problem, tuple(range(len(found.order))))
    assert found.after_bytes == peak(problem, found.order) <= found.before_bytes
    validate(problem, Schedule(tuple(map(OpId, found.order))), keep_order=False)


def late_weight(fenced: bool) -> Problem:
    """A weight's gradient comes after what it could free has been in the way of the largest op."""
    build = graphs.Builder()
    x = build.add("input", [], [50], 1)[0]
    y = build.add("linear", [x], [10], 1)[0]
    gradient = build.add("loss", [y], [10], 1, backward=True)[0]
    gap = build.add("resume", [], [1], 0, backward=True, recomputable=not fenced)[0]
    wide = build.add("input gradient", [gradient, gap], [60], 1, backward=True, target="mm")[0]
    weight = build.add("weight gradient", [x, gradient], [2], 1, backward=True, target="mm")[0]
    return build.problem([wide, weight])


def test_pulls_a_weight_gradient_before_the_peak() -> None:
    problem = late_weight(fenced=False)
    found = order_ops(problem)
    assert found.order.index(5) < found.order.index(4)
    assert found.after_bytes < found.before_bytes


def test_nothing_passes_what_the_caller_does() -> None:
    problem = late_weight(fenced=True)
    ops = [replace(op, target=op.target or "aten.op") if op.name != "resume" else op for op in problem.graph.ops]
    problem = replace(problem, graph=replace(problem.graph, ops=tuple(ops)))
    order = order_ops(problem).order
    assert order[:4] == (0, 1, 2, 3)


def test_schedule_of_the_moved_problem_is_one_of_the_problem() -> None:
    problem = late_weight(fenced=False)
    order = order_ops(problem).order
    steps = translated(Schedule(tuple(map(OpId, range(len(order))))), order)
    moved = simulate(reordered(problem, order), Schedule(tuple(map(OpId, range(len(order))))))
    assert simulate(problem, steps).live_bytes == moved.live_bytes


def recurrence(steps: int) -> Problem:
    """Each step of backward adds to a weight's gradient, which is larger than what one step keeps for it."""
    build = graphs.Builder()
    state, saved = build.add("input", [], [1], 1)[0], []
    for _ in range(steps):
        saved.append(build.add("gates", [state], [12], 1)[0])
        state = build.add("state", [saved[-1]], [1], 1)[0]
    gradient, total = build.add("loss", [state], [1], 1, backward=True)[0], None
    for gates in reversed(saved):
        both = build.add("of gates", [gradient, gates], [4], 1, backward=True)[0]
        gradient = build.add("of state", [both], [1], 1, backward=True)[0]
        part = build.add("of weight", [both], [20], 1, backward=True)[0]
        total = part if total is None else build.add("sum", [total, part], [20], 1, backward=True)[0]
    return build.problem([total])


def test_weight_gradients_do_not_wait_for_the_end_where_forward_has_to_be_computed_again() -> None:
    problem = recurrence(40)
    own = peak(problem, tuple(range(len(problem.graph.ops))))
    fits = order_ops(problem.with_budget(own - 1))
    assert fits.after_bytes < own, "another order alone is enough"
    tight = problem.with_budget(own // 3)
    order = order_ops(tight).order
    assert solve(reordered(tight, order), time_limit_s=1.0).peak_bytes <= own // 3
