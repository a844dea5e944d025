"""Flax NNX modules as arguments: what a call changes of them reaches the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")
import jax.numpy as jnp

import remat
import remat.jax

QUICK = {"time_limit_s": 0.5}
WIDTH = 16


class Net(nnx.Module):
    """Shared layers, statistics of batches, and random keys that are counted."""

    def __init__(self, rngs: Any) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = self.first
        self.scale = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in (self.first, self.second):
            x = self.drop(nnx.gelu(self.scale(layer(x))))
        return x


def loss(net: Net, x: Any) -> Any:
    return (net(x) ** 2).mean()


def batch() -> Any:
    return jax.random.normal(jax.random.key(1), (64, WIDTH))


def same(left: Any, right: Any) -> None:
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)


def trained(function: Callable[..., Any], steps: int = 3) -> tuple[list[float], Any]:
    net = Net(nnx.Rngs(0))
    rule = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(net: Any, rule: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(function)(net, x)
        rule.update(net, gradients)
        return value

    return [float(step(net, rule, batch())) for _ in range(steps)], nnx.state(net)


@pytest.mark.slow
def test_statistics_and_counts_of_keys_reach_the_caller() -> None:
    optimized = remat.jax.optimize(loss, "0.9x", **QUICK)
    (found, after), (wanted, expected) = trained(optimized), trained(loss)
    assert found == pytest.approx(wanted, rel=1e-5) and len(set(wanted)) == 3
    same(after, expected)
    assert len(optimized.prepared) == 1, "steps that follow run under the same plan"


def test_calls_that_are_not_differentiated_change_modules_too() -> None:
    ours, plain = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    assert remat.jax.optimize(loss, "0.9x")(ours, batch()) == pytest.approx(float(loss(plain, batch())), rel=1e-5)
    same(nnx.state(ours), nnx.state(plain))
    assert int(ours.drop.rngs.count[...]) == 2


@pytest.mark.slow
def test_whole_steps_change_modules_and_optimizers() -> None:
    def step(net: Any, rule: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss)(net, x)
        rule.update(net, gradients)
        return value

    def run(step: Callable[..., Any]) -> tuple[Any, Any]:
        net = Net(nnx.Rngs(0))
        rule = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)
        return [step(net, rule, batch()) for _ in range(2)], int(rule.step[...])

    (found, count), (wanted, expected) = run(remat.jax.compile(step, "1x", **QUICK)), run(nnx.jit(step))
    assert count == expected == 2
    same(found, wanted)


@pytest.mark.slow
def test_plans_ahead_are_for_the_parameters_of_modules() -> None:
    optimized = remat.jax.optimize(loss, "0.9x", **QUICK)
    optimized.plan_for(Net(nnx.Rngs(0)), batch())
    nnx.jit(nnx.value_and_grad(optimized))(Net(nnx.Rngs(0)), batch())
    assert len(optimized.prepared) == 1


def test_modules_that_grow_while_they_run_are_refused() -> None:
    def growing(net: Any, x: Any) -> Any:
        net.first.more = nnx.Param(jnp.ones(3))
        return loss(net, x)

    optimized = remat.jax.optimize(growing, "0.9x", **QUICK)
    with pytest.raises(remat.CaptureError, match="adds to a module or takes from it while it runs"):
        nnx.value_and_grad(optimized)(Net(nnx.Rngs(0)), batch())
