"""Policies chosen for a budget: they fit where they are handed to, and gradients stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from tests.support.jax_models import mlp, weights

import remat
import remat.jax
from remat.jax.policies.choices import KeptAt, forwards_of, frontier, kinds_of
from remat.jax.policies.regions import Region

LAYERS, WIDTH, ROWS = 6, 32, 128


def block(weight: Any, x: Any) -> Any:
    wide = checkpoint_name(x @ weight, "up")
    return x + checkpoint_name(jnp.sin(jnp.tanh(wide)), "act") @ weight.T


def scanned(wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    run = wrap(block)

    def loss(parameters: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, weight: (run(weight, x), None), x, parameters)[0] ** 2).mean()

    return loss


def arguments() -> tuple[Any, Any]:
    return jnp.stack([weights(seed)(WIDTH, 4 * WIDTH) for seed in range(LAYERS)]), weights(9)(ROWS, WIDTH)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """The step with everything saved, with nothing, and a policy for something between."""
    parameters, x = arguments()
    rich = remat.jax.measure(jax.value_and_grad(scanned(lambda run: run)), parameters, x)
    lean = remat.jax.measure(jax.value_and_grad(scanned(jax.checkpoint)), parameters, x)
    between = lean.peak_bytes + LAYERS * ROWS * 4 * WIDTH * 4 + 4096
    assert lean.peak_bytes < between < rich.peak_bytes
    chosen = remat.jax.policy(scanned(jax.checkpoint), parameters, x, budget=between)
    return {"rich": rich, "lean": lean, "budget": between, "policy": chosen}


def test_policy_fits_and_uses_what_it_was_given(measured: dict[str, Any]) -> None:
    chosen, parameters, x = measured["policy"], *arguments()
    planned = scanned(partial(jax.checkpoint, policy=chosen))
    used = remat.jax.measure(jax.value_and_grad(planned), parameters, x).peak_bytes
    assert measured["lean"].peak_bytes < used <= measured["budget"]
    assert used == pytest.approx(chosen.predicted_peak, rel=0.01) and chosen.compilations <= 3
    assert len(chosen.saved) == 1 and {*chosen.saved, *chosen.recomputed} == {"up", "act"}
    assert remat.jax.verify(scanned(lambda run: run), planned, parameters, x).ok


def test_settings_of_maxtext_name_each_place(measured: dict[str, Any], tmp_path: Path) -> None:
    chosen = measured["policy"]
    text = chosen.save_maxtext(tmp_path / "remat.yml").read_text()
    assert text.splitlines()[0] == "remat_policy: 'custom'"
    assert set(text.splitlines()[1:]) == {f"{chosen.saved[0]}: 'device'", f"{chosen.recomputed[0]}: 'remat'"}


def test_all_choices_are_looked_at_and_none_beats_another() -> None:
    parameters, x = arguments()
    region = Region(jax.make_jaxpr(block)(parameters[0], x), LAYERS)
    forwards = forwards_of([region, region], _watch())
    assert [item.count for item in forwards] == [2 * LAYERS]
    found = frontier(forwards, kinds_of(forwards), None)
    assert found[0].saved_bytes == 0 and found[-1].saved_bytes == 2 * 2 * LAYERS * ROWS * 4 * WIDTH * 4
    assert [item.time_ns for item in found] == sorted((item.time_ns for item in found), reverse=True)
    offloaded = frontier(forwards, kinds_of(forwards), 1e6)
    assert offloaded[0].saved_bytes == 0 and KeptAt.OFFLOAD in dict(offloaded[0].places).values()


def _watch() -> Any:
    from remat.jax.costs.compiled import default_device
    from remat.jax.costs.timing import stopwatch

    return stopwatch(default_device(), 0.0)


def test_names_can_wait_in_the_memory_of_the_host(measured: dict[str, Any]) -> None:
    parameters, x = arguments()
    chosen = remat.jax.policy(scanned(jax.checkpoint), parameters, x, budget=measured["budget"], offload=True)
    assert {*chosen.saved, *chosen.offloaded, *chosen.recomputed} == {"up", "act"}
    assert remat.jax.verify(scanned(lambda run: run), scanned(partial(jax.checkpoint, policy=chosen)), parameters, x).ok


def test_function_without_names_and_checkpoints_gets_kernels_to_save() -> None:
    loss, parameters, batch = mlp(layers=3, width=16, rows=64)
    chosen = remat.jax.policy(loss, parameters, *batch, budget="2x")
    assert chosen.saved and all(item.startswith("dot_general(") for item in chosen.saved)
    assert remat.jax.verify(loss, jax.checkpoint(loss, policy=chosen), parameters, *batch).ok
    with pytest.raises(remat.RematError, match="the function names nothing"):
        chosen.maxtext()
    with pytest.raises(remat.RematError, match="Only values with names can be offloaded"):
        remat.jax.policy(loss, parameters, *batch, budget="2x", offload=True)


def test_budget_below_the_leanest_policy_is_refused(measured: dict[str, Any]) -> None:
    with pytest.raises(remat.InfeasibleBudget, match="under the leanest policy") as caught:
        remat.jax.policy(scanned(jax.checkpoint), *arguments(), budget=measured["lean"].peak_bytes - 4096)
    assert caught.value.min_budget == pytest.approx(measured["lean"].peak_bytes, rel=0.01)


def linen(policy: Any) -> tuple[Any, Any]:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return block(self.param("w", nn.initializers.lecun_normal(), (WIDTH, 4 * WIDTH)), x)

    model = nn.remat(Block, policy=policy)()
    return model.apply, model.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))


def haiku(policy: Any) -> tuple[Any, Any]:
    import haiku as hk

    def net(x: Any) -> Any:
        weight = hk.get_parameter("w", (WIDTH, 4 * WIDTH), init=hk.initializers.VarianceScaling())
        return hk.remat(partial(block, weight), policy=policy)(x)

    model = hk.without_apply_rng(hk.transform(net))
    return model.apply, model.init(jax.random.key(0), jnp.ones((ROWS, WIDTH)))


def nnx(policy: Any) -> tuple[Any, Any]:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(weights(0)(WIDTH, 4 * WIDTH))

        def __call__(self, x: Any) -> Any:
            return nnx.remat(lambda self, x: block(self.w[...], x), policy=policy)(self, x)

    graph, state = nnx.split(Block())
    return lambda state, x: nnx.merge(graph, state)(x), state


def equinox(policy: Any) -> tuple[Any, Any]:
    import equinox as eqx

    return lambda weight, x: eqx.filter_checkpoint(block, policy=policy)(weight, x), weights(0)(WIDTH, 4 * WIDTH)


@pytest.mark.parametrize("library", [linen, haiku, nnx, equinox])
def test_libraries_take_the_policy(library: Any, measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"linen": "flax", "nnx": "flax"}.get(library.__name__, library.__name__))
    run, parameters = library(measured["policy"])
    traced = jax.make_jaxpr(jax.grad(lambda parameters, x: (run(parameters, x) ** 2).sum()))(
        parameters, jnp.ones((ROWS, WIDTH))
    )
    policies = [
        equation.params["policy"]
        for equation in traced.jaxpr.eqns
        if equation.primitive.name in ("checkpoint", "remat2")
    ]
    assert policies and all(item is measured["policy"] for item in policies)
