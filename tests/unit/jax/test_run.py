"""Schedules replayed by jax: any valid one gives the gradients of jax.grad, and segments cost no memory."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.validate import validate
from remat.jax.graph.capture import capture
from remat.jax.graph.contract import FusedGraph, contract
from remat.jax.run.cuts import segment_numbers
from remat.jax.run.hold import Means, first_token, holder, means_for
from remat.jax.run.replay import Replay, cut_segments
from remat.solvers import min_budget, solve

UNARY = (jnp.tanh, jnp.sin, jax.nn.relu, jax.nn.gelu, lambda x: x * 0.5 + 1, lambda x: x.T, lambda x: x - x.mean())
BINARY = (jnp.add, jnp.multiply, jnp.matmul, lambda x, y: jnp.where(x > y, x, y), lambda x, y: jax.nn.softmax(x) @ y)
SIDE = 6


@st.composite
def functions(draw: st.DrawFn) -> tuple[Any, int]:
    """A loss of two matrices: each step applies something to values made before."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=14)
    )

    def loss(x: Any, y: Any) -> Any:
        values = [x, y]
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            values.append(UNARY[kind](a) if kind < len(UNARY) else BINARY[kind - len(UNARY)](a, b) / SIDE)
        return sum((value**2).mean() for value in values[-3:])

    return loss, len(steps)


def problem_of(function: Any, *values: Any) -> tuple[FusedGraph, Problem]:
    step = capture(lambda *given: [function(*given)], [jax.typeof(value) for value in values], [True] * len(values))
    found = contract(step.program)
    outputs = set(found.graph.outputs)
    sizes = tuple(0 if v in outputs else step.program.bytes_of(n) for v, n in enumerate(found.number_of))
    count = len(found.graph.ops)
    return found, Problem(found.graph, Costs((1.0,) * count, (0,) * count, sizes), 1 << 40)


def gradients(replay: Replay, means: Means, values: list[Any]) -> Any:
    def run(*given: Any) -> Any:
        hold, token = holder(means), first_token(means, given)
        results, saved = replay.forward(given, hold, token)
        return results, replay.backward(given, saved, [jnp.ones(())], hold, token)

    return jax.jit(run)(*values)


def matrices() -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(SIDE, SIDE)), jnp.float32) for _ in range(2)]


@settings(max_examples=8)
@given(functions(), st.sampled_from(Means), st.floats(0.0, 1.0))
def test_schedules_of_random_functions_give_the_gradients_of_jax(
    case: tuple[Any, int], means: Means, share: float
) -> None:
    loss, _ = case
    values = matrices()
    found, problem = problem_of(loss, *values)
    plain = simulate(problem, plain_schedule(found.graph)).peak_bytes
    least = min_budget(problem)
    budget = int(least + share * (plain - least))
    schedule = solve(problem.with_budget(budget), "auto", time_limit_s=0.3).schedule
    assert schedule is not None
    replay = cut_segments(found, schedule, segment_numbers(problem, schedule, {found.boundary}, 4))
    results, made = gradients(replay, means, values)
    expected, wanted = jax.value_and_grad(loss, argnums=(0, 1))(*values)
    np.testing.assert_allclose(results[0], expected, rtol=1e-5, atol=1e-6)
    for left, right in zip(made, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5 * float(abs(right).max() + 1e-6))


def chain(x: Any, y: Any) -> Any:
    for _ in range(6):
        x = jnp.tanh(x @ y)
    return (x**2).sum()


def recomputing() -> tuple[FusedGraph, Problem, Schedule]:
    found, problem = problem_of(chain, *matrices())
    plain = simulate(problem, plain_schedule(found.graph)).peak_bytes
    problem = problem.with_budget(int(0.7 * plain))
    schedule = solve(problem, "auto", time_limit_s=1.0).schedule
    assert schedule is not None and schedule.recomputed()
    return found, problem, schedule


def test_segments_never_lift_the_peak() -> None:
    _, problem, schedule = recomputing()
    numbers = segment_numbers(problem, schedule, (), 16)
    timeline = simulate(problem, schedule)
    for number in set(numbers):
        steps = [step for step, found in enumerate(numbers) if found == number]
        for step in steps:
            held = sum(
                problem.costs.size_bytes[value]
                for birth in range(steps[0])
                for value, end in zip(
                    problem.graph.ops[schedule.steps[birth]].outputs, timeline.last_uses[birth], strict=True
                )
                if steps[0] <= end < step
            )
            assert timeline.live_bytes[step] + held <= timeline.peak_bytes


def test_ops_that_stand_alone_are_segments_of_their_own() -> None:
    found, problem, schedule = recomputing()
    numbers = segment_numbers(problem, schedule, {found.boundary})
    place = schedule.steps.index(found.boundary)
    assert numbers.count(numbers[place]) == 1 and numbers == sorted(numbers)


def test_forward_saves_what_backward_reads_and_does_not_make() -> None:
    found, problem, schedule = recomputing()
    validate(problem, schedule, keep_order=False)
    replay = cut_segments(found, schedule, segment_numbers(problem, schedule, {found.boundary}))
    plain = plain_schedule(found.graph)
    all_saved = cut_segments(found, plain, segment_numbers(problem, plain, {found.boundary})).saved
    assert len(replay.saved) < len(all_saved)


@pytest.mark.parametrize("means", [Means.BARRIERS, Means.CONDITIONALS])
def test_recomputation_survives_the_compiler(means: Means) -> None:
    """XLA would merge what is computed twice from the same; then nothing would be saved."""
    found, problem, schedule = recomputing()
    replay = cut_segments(found, schedule, segment_numbers(problem, schedule, {found.boundary}))

    def computed(means: Means) -> int:
        def run(*given: Any) -> Any:
            hold, token = holder(means), first_token(means, given)
            results, saved = replay.forward(given, hold, token)
            return replay.backward(given, saved, [jnp.ones(())], hold, token)

        text = jax.jit(run).lower(*matrices()).compile().as_text()
        return sum(text.count(f" {name}(") for name in ("tanh", "dot", "add", "subtract", "multiply"))

    assert computed(means) > computed(Means.NOTHING)


def test_convolutions_stay_outside_of_conditionals() -> None:
    def loss(x: Any, kernel: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return (x**2).sum()

    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 4, 8, 8), (4, 4, 3, 3))]
    found, problem = problem_of(loss, *values)
    schedule = plain_schedule(found.graph)
    alone = {found.boundary, *(n for n, op in enumerate(found.graph.ops) if op.target == "conv_general_dilated")}
    replay = cut_segments(found, schedule, segment_numbers(problem, schedule, alone))
    results, made = gradients(replay, Means.CONDITIONALS, values)
    wanted = jax.grad(loss, argnums=(0, 1))(*values)
    for left, right in zip(made, wanted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4 * float(abs(right).max()))


def test_processors_need_conditionals_and_accelerators_barriers() -> None:
    assert means_for("cpu") is Means.CONDITIONALS
    assert {means_for("gpu"), means_for("tpu")} == {Means.BARRIERS}
