"""Scans planned by their body: frontiers, splits, and gradients of every split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remat.jax.costs.compiled import default_device
from remat.jax.costs.insides import cost_inside
from remat.jax.costs.timing import stopwatch
from remat.jax.run.hold import Means
from remat.jax.scans.body import Body, BodyPlan, ScanShape
from remat.jax.scans.rewrite import ScanPlans, has_scans, with_planned_scans
from remat.jax.scans.split import IterationRun, in_one, refined, saved_bytes, split, time_ns

LENGTH, WIDTH = 7, 8


@dataclass(frozen=True, slots=True)
class Curve:
    """A frontier as (bytes, time) pairs."""

    points: tuple[tuple[int, float], ...]
    length: int

    def body(self) -> Body:
        plans = tuple(BodyPlan(size, time, None, None) for size, time in self.points)  # type: ignore[arg-type]
        return Body(ScanShape(0, 1, self.length, False), None, "", plans)  # type: ignore[arg-type]


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Convex, from rich and fast to lean and slow."""
    steps = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=0, max_size=4))
    size, time, points = 1, 100.0, [(1, 100.0)]
    for more, gain in sorted(steps, key=lambda item: -item[1]):
        size, time = size + more, time - more * gain / 10
        points.append((size, time))
    return Curve(tuple(reversed(points)), draw(st.integers(2, 9)))


@given(st.lists(curves(), min_size=1, max_size=3), st.integers(0, 500))
def test_splits_fit_and_have_at_most_three_plans(found: list[Curve], allowed: int) -> None:
    bodies = dict(enumerate(curve.body() for curve in found))
    chosen = split(bodies, allowed)
    least = sum(body.leanest.saved_bytes * body.shape.length for body in bodies.values())
    assert sum(map(saved_bytes, chosen.values())) <= max(allowed, least)
    for site, runs in chosen.items():
        assert sum(run.count for run in runs) == bodies[site].shape.length
        assert 1 <= len(runs) <= 3 and all(run.count > 1 for run in runs), "a loop of one iteration is none to XLA"


@given(st.lists(curves(), min_size=1, max_size=3), st.integers(0, 500))
def test_one_plan_for_all_iterations_is_the_fastest_that_fits(found: list[Curve], allowed: int) -> None:
    bodies = dict(enumerate(curve.body() for curve in found))
    chosen = in_one(bodies, allowed)
    least = sum(body.leanest.saved_bytes * body.shape.length for body in bodies.values())
    assert all(len(runs) == 1 and runs[0].count == bodies[site].shape.length for site, runs in chosen.items())
    assert sum(map(saved_bytes, chosen.values())) <= max(allowed, least)
    if len(bodies) == 1 and allowed >= least:
        fitting = [plan for plan in bodies[0].frontier if plan.saved_bytes * bodies[0].shape.length <= allowed]
        assert chosen[0][0].plan.time_ns == min(plan.time_ns for plan in fitting)


@given(curves(), st.integers(0, 400), st.integers(0, 100))
def test_more_memory_is_never_slower(curve: Curve, allowed: int, more: int) -> None:
    def time(budget: int) -> float:
        return sum(run.count * run.plan.time_ns for run in split({0: curve.body()}, budget)[0])

    assert time(allowed + more) <= time(allowed) + 1e-9


@given(curves(), st.integers(0, 400))
def test_splits_of_one_scan_come_near_the_best_of_all(curve: Curve, allowed: int) -> None:
    """All ways to give each number of iterations one of the plans, at most three of them and none alone."""
    body = curve.body()
    runs = split({0: body}, allowed)[0]
    sizes, times = np.array([p.saved_bytes for p in body.frontier]), np.array([p.time_ns for p in body.frontier])
    best = float(body.leanest.time_ns * curve.length)
    for counts in _compositions(curve.length, len(sizes)):
        used = np.array(counts)
        if (used == 1).any() or (used > 0).sum() > 3 or used @ sizes > allowed:
            continue
        best = min(best, float(used @ times))
    step = max((a - b) for a, b in zip([*times[1:], times[-1]], times, strict=True)) if len(times) > 1 else 0.0
    assert best - 1e-9 <= time_ns(runs) <= best + 2 * step + 1e-9


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def test_a_third_plan_uses_what_two_leave() -> None:
    body = Curve(((9, 1.0), (5, 4.0), (1, 8.0)), 8).body()
    counts = [(run.count, run.plan.saved_bytes) for run in split({0: body}, 8 + 4 * 6 + 4 * 2 + 3)[0]]
    assert counts == [(8, 5)]
    between = BodyPlan(3, 6.5, None, None)  # type: ignore[arg-type]
    found = refined(
        replace(body, others=(between,)), (IterationRun(4, body.frontier[1]), IterationRun(4, body.leanest)), 29
    )
    assert [(run.count, run.plan.saved_bytes) for run in found] == [(4, 5), (2, 3), (2, 1)]


def recurrent(parameters: Any, x: Any, *, reverse: bool = False) -> Any:
    def cell(carry: Any, item: Any) -> tuple[Any, Any]:
        h, n = carry
        z = jnp.tanh(item @ parameters["in"] + h @ parameters["state"])
        h = h + jnp.sin(z) * jnp.exp(-z)
        return (h, n + 1), (h * 2, n)

    (h, n), (rows, numbers) = jax.lax.scan(cell, (jnp.zeros((3, WIDTH)), 0), x, reverse=reverse)
    return (rows**2).mean() + h.sum() * n + (numbers * rows.sum((1, 2))).sum()


def case() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)  # noqa: E731
    return {"in": new(WIDTH, WIDTH), "state": new(WIDTH, WIDTH)}, new(LENGTH, 3, WIDTH)


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_split_gives_the_gradients_of_jax(reverse: bool) -> None:
    parameters, x = case()
    leaves, tree = jax.tree.flatten((parameters, x))
    traced = jax.make_jaxpr(lambda *v: [recurrent(*jax.tree.unflatten(tree, v), reverse=reverse)])(*leaves)
    assert has_scans(traced.jaxpr)
    plans = ScanPlans(stopwatch(default_device(), 0.5))
    run = with_planned_scans(traced, plans)
    wanted = jax.grad(lambda *v: recurrent(*jax.tree.unflatten(tree, v), reverse=reverse), argnums=(0, 1, 2))(*leaves)
    for allowed, means in ((0, Means.CONDITIONALS), (3000, Means.NOTHING), (1 << 40, Means.NOTHING)):
        plans.allowed_bytes, plans.means = allowed, means
        found = jax.jit(jax.grad(lambda *v: run(*v)[0], argnums=(0, 1, 2)))(*leaves)
        for left, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(left, right, rtol=2e-5, atol=1e-5 * float(abs(right).max()))
    (body,) = plans.bodies.values()
    sizes = [plan.saved_bytes for plan in body.frontier]
    times = [plan.time_ns for plan in body.frontier]
    assert sizes == sorted(sizes, reverse=True) and times == sorted(times) and len(sizes) > 1


def test_a_carry_that_backward_reads_is_saved_only_where_that_pays() -> None:
    """The derivative of tanh reads its result, which is the next carry: leanest is to save the carry alone."""

    def loss(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0].sum()

    leaves = jnp.ones((LENGTH, WIDTH, WIDTH)), jnp.ones((3, WIDTH))
    plans = ScanPlans(stopwatch(default_device(), 0.5))
    run = with_planned_scans(jax.make_jaxpr(lambda *v: [loss(*v)])(*leaves), plans)
    jax.make_jaxpr(jax.grad(lambda *v: run(*v)[0]))(*leaves)
    (body,) = plans.bodies.values()
    assert body.leanest.saved_bytes == leaves[1].nbytes


def test_inputs_that_are_not_differentiated_get_no_gradient() -> None:
    parameters, x = case()
    leaves, tree = jax.tree.flatten((parameters, x))
    traced = jax.make_jaxpr(lambda *v: [recurrent(*jax.tree.unflatten(tree, v))])(*leaves)
    plans = ScanPlans(stopwatch(default_device(), 0.5))
    run = with_planned_scans(traced, plans)
    jax.make_jaxpr(jax.grad(lambda *v: run(*v)[0]))(*leaves)
    (body,) = plans.bodies.values()
    assert not body.captured.wanted[-1], "the data's gradient is not asked for"


def test_a_scan_costs_as_much_as_its_iterations() -> None:
    def cost(length: int) -> Any:
        traced = jax.make_jaxpr(lambda c, x: jax.lax.scan(lambda c, x: (jnp.tanh(c @ c) + x, c), c, x))(
            jnp.ones((WIDTH, WIDTH)), jnp.ones((length, WIDTH, WIDTH))
        )
        return cost_inside("scan", traced.jaxpr.eqns[0].params, stopwatch(default_device(), 0.5))

    short, long = cost(2), cost(20)
    assert long.time_ns == pytest.approx(10 * short.time_ns)
    assert long.workspace_bytes == short.workspace_bytes > 0


def test_loops_without_an_end_on_zeros_are_not_run_to_see() -> None:
    def doubled(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x.sum() < 1e4, lambda x: 2 * x, x)

    traced = jax.make_jaxpr(doubled)(jnp.ones((WIDTH, WIDTH)))
    found = cost_inside("while", traced.jaxpr.eqns[0].params, stopwatch(default_device(), 0.5))
    assert found.time_ns > 0 and found.workspace_bytes >= WIDTH * WIDTH * 4


def test_the_dearest_branch_is_what_branches_take() -> None:
    def taken(count: int) -> Any:
        def run(x: Any) -> Any:
            for _ in range(count):
                x = jnp.tanh(x @ x)
            return x

        return run

    def cost(*counts: int) -> Any:
        traced = jax.make_jaxpr(lambda n, x: jax.lax.switch(n, list(map(taken, counts)), x))(
            1, jnp.ones((WIDTH, WIDTH))
        )
        (equation,) = (item for item in traced.jaxpr.eqns if item.primitive.name == "cond")
        return cost_inside("cond", equation.params, stopwatch(default_device(), 0.5))

    assert cost(1, 6, 2).time_ns == pytest.approx(6 * cost(0, 1).time_ns)
    assert cost(1, 6, 2).workspace_bytes == cost(6, 6).workspace_bytes


def test_functions_without_scans_are_left_alone() -> None:
    assert not has_scans(jax.make_jaxpr(lambda x: jnp.sin(x).sum())(jnp.ones(3)).jaxpr)
