"""Losses of jax under a budget: fits, same gradients, and clear words for what cannot be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from tests.support import jax_blocks
from tests.support.jax_models import Case, mlp, scanned_mlp

import remat
import remat.jax
from remat.core.results.plan import ScanRun
from remat.jax import loop
from remat.jax.costs import compiled

QUICK = {"time_limit_s": 1.0}


@pytest.fixture(scope="module")
def planned() -> tuple[Case, Any]:
    """A loss under 0.6 of its temporaries, planned once for all tests that only look at it."""
    case = mlp()
    loss, parameters, batch = case
    optimized = remat.jax.optimize(loss, "0.6x", **QUICK)
    jax.jit(jax.value_and_grad(optimized)).lower(parameters, *batch)
    return case, optimized


def temporaries(function: Callable[..., Any], *args: Any) -> int:
    return remat.jax.measure(function, *args).temporary_bytes


def test_compiled_step_fits_and_gradients_agree(planned: tuple[Case, Any]) -> None:
    (loss, parameters, batch), optimized = planned
    plain = temporaries(jax.value_and_grad(loss), parameters, *batch)
    assert temporaries(jax.value_and_grad(optimized), parameters, *batch) <= 0.6 * plain
    assert remat.jax.verify(loss, optimized, parameters, *batch).ok


def test_plan_is_the_one_that_every_report_reads(planned: tuple[Case, Any], tmp_path: Path) -> None:
    _, optimized = planned
    plan = remat.jax.plan_of(optimized)
    assert plan.predicted_peak <= plan.budget_bytes < plan.plain_peak_bytes
    assert plan.overhead > 0 and plan.gap < 0.5
    assert "layers.0" in str(plan.explain()) and "none" in str(plan.compare())
    assert plan.fingerprint.torch_version == f"jax {jax.__version__}"
    plan.save(tmp_path / "plan.json")
    assert remat.Plan.load(tmp_path / "plan.json") == plan
    assert plan.to_html(tmp_path / "plan.html").stat().st_size > 10_000


def test_saved_plan_runs_without_planning(planned: tuple[Case, Any], tmp_path: Path) -> None:
    (loss, parameters, batch), optimized = planned
    remat.jax.plan_of(optimized).save(tmp_path / "plan.json")
    applied = remat.jax.apply(loss, remat.Plan.load(tmp_path / "plan.json"))
    assert remat.jax.verify(loss, applied, parameters, *batch).ok
    (prepared, _), *others = applied.prepared.values()
    assert prepared.compilations == 0 and not others


def test_plan_is_refused_for_another_shape(planned: tuple[Case, Any]) -> None:
    (loss, parameters, (x,)), optimized = planned
    applied = remat.jax.apply(loss, remat.jax.plan_of(optimized))
    with pytest.raises(remat.PlanMismatch, match="made for other shapes: .* in the plan and .* here"):
        jax.grad(applied)(parameters, x[:8])


def test_plan_is_refused_for_another_version(planned: tuple[Case, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (loss, parameters, batch), optimized = planned
    applied = remat.jax.apply(loss, remat.jax.plan_of(optimized))
    monkeypatch.setattr(jax, "__version__", "99.0")
    with pytest.raises(remat.PlanMismatch, match="another jax version: jax .* in the plan and jax 99.0 here"):
        jax.grad(applied)(parameters, *batch)


def test_without_differentiation_the_function_runs_as_it_is(planned: tuple[Case, Any]) -> None:
    (loss, parameters, batch), _ = planned
    optimized = remat.jax.optimize(loss, "0.6x")
    assert optimized(parameters, *batch) == pytest.approx(loss(parameters, *batch))
    with pytest.raises(remat.CaptureError, match="There is no plan yet"):
        remat.jax.plan_of(optimized)


@pytest.mark.slow
def test_other_shapes_get_plans_of_their_own(planned: tuple[Case, Any]) -> None:
    (loss, parameters, (x,)), _ = planned
    optimized = remat.jax.optimize(loss, "0.9x", **QUICK)
    for rows in (64, 128):
        assert remat.jax.verify(loss, optimized, parameters, x[:rows]).ok
    assert len(optimized.prepared) == 2


def several(parameters: Any, number: Any, key: Any, x: Any, *, scale: float) -> Any:
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    for layer in parameters:
        x = jnp.tanh(x @ layer)
    return (x**2).mean() * scale * number, {"rows": x, "count": jnp.int32(3)}


@pytest.mark.slow
def test_aux_integers_keys_and_keywords() -> None:
    _, parameters, (x,) = mlp(layers=4)
    optimized = remat.jax.optimize(several, "0.9x", has_aux=True, **QUICK)
    arguments = (parameters, jnp.int32(2), jax.random.key(0), x)
    found = remat.jax.verify(several, optimized, *arguments, has_aux=True, scale=2.0)
    assert found.ok, found.differences
    assert remat.jax.verify(several, optimized, *arguments, argnums=(0, 3), has_aux=True, scale=2.0).ok
    assert len(optimized.prepared) == 2, "each choice of arguments has its own plan"


def test_callbacks_run_once_although_their_readers_run_again() -> None:
    calls: list[int] = []

    def host(x: Any) -> Any:
        calls.append(1)
        return x

    def loss(parameters: Any, x: Any) -> Any:
        x = x * jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        for layer in parameters:
            x = jnp.tanh(x @ layer)
        return (x**2).mean()

    _, parameters, batch = mlp()
    optimized = remat.jax.optimize(loss, "0.7x", **QUICK)
    step = jax.jit(jax.grad(optimized)).lower(parameters, *batch).compile()
    calls.clear()
    jax.block_until_ready(step(parameters, *batch))
    assert len(calls) == 1 and remat.jax.plan_of(optimized).overhead > 0


def test_transformations_compose() -> None:
    _, parameters, (x,) = mlp(layers=2, width=8, rows=4)
    loss = mlp(layers=2, width=8, rows=4)[0]
    optimized = remat.jax.optimize(loss, "1x", **QUICK)
    each = jax.vmap(jax.grad(optimized), (None, 0))(parameters, x[:, None])
    wanted = jax.vmap(jax.grad(loss), (None, 0))(parameters, x[:, None])
    for left, right in zip(each, wanted, strict=True):
        assert jnp.allclose(left, right, rtol=1e-5, atol=1e-6)

    def twice(function: Any) -> Any:
        return jax.grad(lambda p: sum((g**2).sum() for g in jax.grad(function)(p, x)))(parameters)

    for left, right in zip(twice(optimized), twice(loss), strict=True):
        assert jnp.allclose(left, right, rtol=1e-4, atol=1e-6)


def test_scans_fit_agree_and_run_from_files(tmp_path: Path) -> None:
    loss, parameters, batch = scanned_mlp()
    optimized = remat.jax.optimize(loss, "0.5x", **QUICK)
    plain = temporaries(jax.value_and_grad(loss), parameters, *batch)
    assert temporaries(jax.value_and_grad(optimized), parameters, *batch) <= 0.5 * plain
    assert remat.jax.verify(loss, optimized, parameters, *batch).ok
    remat.jax.plan_of(optimized).save(tmp_path / "plan.json")
    saved = remat.Plan.load(tmp_path / "plan.json")
    assert saved == remat.jax.plan_of(optimized) and saved.compiled is not None
    assert sum(run.count for run in saved.compiled.scans[0].runs) == len(parameters)
    assert saved.overhead > 0 and saved.compiled.held, "iterations make things again"
    applied = remat.jax.apply(loss, saved)
    assert (
        temporaries(jax.value_and_grad(applied), parameters, *batch)
        == remat.jax.measure(jax.value_and_grad(optimized), parameters, *batch).temporary_bytes
    ), "a file says all that decides what a step needs"
    assert remat.jax.verify(loss, applied, parameters, *batch).ok
    with pytest.raises(remat.PlanMismatch, match="another body or length"):
        jax.grad(remat.jax.apply(loss, saved))(parameters[:6], *batch)
    with pytest.raises(remat.PlanMismatch, match="does not know its scan 1"):
        jax.grad(remat.jax.apply(lambda p, x: loss(p, x) + loss(p, x * 2), saved))(parameters, *batch)
    broken = replace(saved.compiled.scans[0], runs=(ScanRun(len(parameters), (0, 1)),))
    with pytest.raises(remat.PlanMismatch, match="schedule for scan 0 is not valid"):
        changed = replace(saved, compiled=replace(saved.compiled, scans=(broken,)))
        jax.grad(remat.jax.apply(loss, changed))(parameters, *batch)


def test_five_steps_of_an_optimizer_end_in_the_same_parameters() -> None:
    optax = pytest.importorskip("optax")
    loss, parameters, batch = mlp(layers=4)
    rule = optax.adam(1e-2)

    def trained(function: Any) -> Any:
        @jax.jit
        def step(parameters: Any, state: Any) -> Any:
            updates, state = rule.update(jax.grad(function)(parameters, *batch), state)
            return optax.apply_updates(parameters, updates), state

        found, state = parameters, rule.init(parameters)
        for _ in range(5):
            found, state = step(found, state)
        return found

    optimized = remat.jax.optimize(loss, "0.7x", **QUICK)
    for left, right in zip(trained(optimized), trained(loss), strict=True):
        assert float(abs(left - right).max()) <= 1e-5 * float(abs(right).max())


@pytest.mark.slow
def test_whole_steps_fit_with_their_optimizer() -> None:
    optax = pytest.importorskip("optax")
    loss, parameters, batch = mlp(layers=8)
    rule = optax.adam(1e-3)

    def step(parameters: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        updates, state = rule.update(gradients, state)
        return value, optax.apply_updates(parameters, updates), state

    state = rule.init(parameters)
    trained = remat.jax.compile(step, "0.7x", **QUICK)
    with pytest.raises(remat.CaptureError, match="made at the first call"):
        trained.plan  # noqa: B018
    found = trained(parameters, state, *batch)
    for left, right in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(parameters, state, *batch)), strict=True
    ):
        assert jnp.allclose(left, right, rtol=1e-5, atol=1e-7)
    assert trained.plan.predicted_peak <= trained.plan.budget_bytes and trained.plan.overhead > 0


def test_verify_tells_what_differs(planned: tuple[Case, Any]) -> None:
    (loss, parameters, batch), _ = planned
    found = remat.jax.verify(loss, lambda *args: loss(*args) * 1.01, parameters, *batch)
    assert not found.ok and found.worst == pytest.approx(0.01, rel=0.1)
    assert found.differences[0].startswith("result differs by 0.01")


def test_measure_adds_up(planned: tuple[Case, Any]) -> None:
    (loss, parameters, batch), _ = planned
    found = remat.jax.measure(jax.grad(loss), parameters, *batch)
    assert sum(found.breakdown.values()) == found.peak_bytes and found.seconds > 0
    with pytest.raises(remat.RematError, match="hand it arrays instead of shapes"):
        remat.jax.measure(jax.grad(loss), parameters, jax.ShapeDtypeStruct((8, 64), jnp.float32))


def test_plan_ahead_of_time_needs_shapes_only(planned: tuple[Case, Any]) -> None:
    (loss, parameters, (x,)), _ = planned
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (parameters, x))
    plan = remat.jax.plan(loss, *shapes, budget="2GiB", **QUICK)
    assert plan.overhead == 0 and plan.budget_bytes == 2 << 30


def test_too_small_a_budget_is_refused_with_the_smallest(planned: tuple[Case, Any]) -> None:
    (loss, parameters, batch), _ = planned
    with pytest.raises(remat.InfeasibleBudget, match="Budget .* is below the .* raise the budget") as caught:
        remat.jax.plan(loss, parameters, *batch, budget="0.05x", **QUICK)
    assert caught.value.min_budget > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda loss, args: remat.jax.plan(loss, *args, budget="many"), "Cannot read the budget"),
        (lambda loss, args: remat.jax.plan(loss, *args, budget="50%"), "does not tell how much memory it has"),
        (lambda loss, args: remat.jax.plan(loss, *args, budget="1x", has_aux=True), "must return a pair"),
        (
            lambda loss, args: remat.jax.plan(lambda n: n * 2, jnp.int32(1), budget="1x"),
            "None of the arguments .* is an array of floats",
        ),
        (lambda loss, args: remat.jax.plan(loss, *args, budget="1x", argnums=5), "was given 2 arguments"),
        (lambda loss, args: remat.jax.plan_of(loss), "takes what remat.jax.optimize returned"),
    ],
)
def test_bad_input_is_told_in_one_sentence(planned: tuple[Case, Any], call: Any, message: str) -> None:
    (loss, parameters, batch), _ = planned
    with pytest.raises(remat.RematError, match=message) as caught:
        call(loss, (parameters, *batch))
    assert "\n" not in str(caught.value)


def test_what_xla_happens_to_need_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """After compilations of which none fits, the leanest schedule is tried."""
    loss, parameters, batch = scanned_mlp()
    allowed, tried = int(0.6 * temporaries(jax.value_and_grad(loss), parameters, *batch)), []
    memory_of, leanest = loop.memory_of, loop._leanest

    def needs(step: Any) -> Any:
        found = memory_of(step)
        is_leaner = found.temporary_bytes <= allowed and not tried
        return replace(found, temporary_bytes=allowed + 1) if is_leaner else found

    monkeypatch.setattr(loop, "memory_of", needs)
    monkeypatch.setattr(loop, "_leanest", lambda *args: tried.append(1) or leanest(*args))
    optimized = remat.jax.optimize(loss, "0.6x", **QUICK)
    assert optimized.plan_for(parameters, *batch).compilations <= 4 and tried
    assert remat.jax.verify(loss, optimized, parameters, *batch).ok


@pytest.mark.slow
def test_scans_go_as_low_as_checkpointed_bodies() -> None:
    """What `jax.checkpoint` around the body needs is enough, also where the model says that more is needed."""
    model = jax_blocks.gpt(scanned=True, layers=3, width=32)
    allowed = remat.jax.measure(jax.value_and_grad(model.checkpointed), *model.arguments)
    optimized = remat.jax.optimize(model.plain, allowed.peak_bytes, **QUICK)
    assert remat.jax.measure(jax.value_and_grad(optimized), *model.arguments).peak_bytes <= allowed.peak_bytes
    assert remat.jax.verify(model.plain, optimized, *model.arguments).ok


@pytest.mark.slow
def test_loops_that_would_not_end_on_zeros_are_planned() -> None:
    def loss(parameters: Any, x: Any) -> Any:
        x = jax.lax.while_loop(lambda x: x.sum() < 1e4, lambda x: 2 * x, jax.lax.stop_gradient(x))
        return mlp()[0](parameters, x / 100)

    _, parameters, (x,) = mlp()
    optimized = remat.jax.optimize(loss, "0.7x", **QUICK)
    assert remat.jax.verify(loss, optimized, parameters, abs(x)).ok


def test_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        platform = "abacus"

    monkeypatch.setattr(compiled, "default_device", Device)
    with pytest.raises(remat.CaptureError, match="does not know the jax backend `abacus`"):
        remat.jax.compiler_options()


def test_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['jax'] = None; import remat; remat.jax.optimize"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip().endswith(
        "remat.errors.MissingExtra: remat.jax.optimize needs JAX; install `remat[jax]`."
    )


def test_public_names_resolve() -> None:
    assert [name for name in remat.jax.__all__ if getattr(remat.jax, name, None) is None] == []
    with pytest.raises(AttributeError):
        remat.jax.nothing  # noqa: B018
