"""Networks of jax and its libraries under budgets: they fit, use what they were given, and train as before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from tests.support import jax_models
from tests.support.jax_models import Case

import remat
import remat.jax

MODELS: dict[str, tuple[str, Callable[[], Case]]] = {
    "bert": ("flax", jax_models.bert),
    "vit": ("flax", jax_models.vit),
    "lstm": ("haiku", jax_models.lstm),
    "resnet": ("jax", jax_models.resnet),
    "gpt": ("jax", partial(jax_models.gpt, layers=12)),
    "scanned": ("jax", partial(jax_models.scanned_gpt, layers=12)),
}


def fits(case: Case, share: float) -> Any:
    """Plan for a share of the plain step's temporaries, compile, and look; returns the function."""
    loss, parameters, batch = case
    optimized = remat.jax.optimize(loss, f"{share}x")
    plain = remat.jax.measure(jax.value_and_grad(loss), parameters, *batch).temporary_bytes
    used = remat.jax.measure(jax.value_and_grad(optimized), parameters, *batch).temporary_bytes
    ((prepared, _),) = optimized.prepared.values()
    plan = prepared.plan
    resident = sum(size for _, size in plan.breakdown_bytes)
    assert used <= share * plain
    assert 0.95 * (plan.predicted_peak - resident) <= used <= plan.predicted_peak - resident + 4096
    assert prepared.compilations <= 3
    assert remat.jax.verify(loss, optimized, parameters, *batch).ok
    return optimized


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2])
def test_small_gpt_fits_in_half(layers: int) -> None:
    fits(jax_models.gpt(layers=layers, length=64, batch=2), 0.6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "share"),
    [
        *(("gpt", share) for share in (0.7, 0.5, 0.35, 0.25)),
        *(("scanned", share) for share in (0.5, 0.3, 0.2)),
        *(("bert", 0.6), ("vit", 0.6), ("lstm", 0.6), ("resnet", 0.7)),
    ],
)
def test_model_fits_its_budget(name: str, share: float) -> None:
    library, build = MODELS[name]
    pytest.importorskip(library)
    fits(build(), share)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "lstm", "resnet"])
def test_five_steps_end_in_the_same_parameters(name: str) -> None:
    optax = pytest.importorskip("optax")
    library, build = MODELS[name]
    pytest.importorskip(library)
    loss, parameters, batch = build()
    rule = optax.sgd(1e-2, momentum=0.9)

    def trained(function: Any) -> Any:
        @partial(jax.jit, compiler_options=remat.jax.compiler_options())
        def step(parameters: Any, state: Any) -> Any:
            updates, state = rule.update(jax.grad(function)(parameters, *batch), state)
            return optax.apply_updates(parameters, updates), state

        found, state = parameters, rule.init(parameters)
        for _ in range(5):
            found, state = step(found, state)
        return jax.tree.leaves(found)

    planned = trained(remat.jax.optimize(loss, "0.7x"))
    for left, right in zip(planned, trained(loss), strict=True):
        assert float(abs(left - right).max()) <= 1e-5 * max(float(abs(right).max()), 1e-2)


@pytest.mark.long
def test_planning_of_a_large_step_takes_seconds() -> None:
    """All but compiling: capture, timing, and one solve of some 900 ops."""
    import time

    from remat.core.budget import parse_budget
    from remat.jax.graph.leaves import Leaves
    from remat.jax.loop import Asked, model_of, propose
    from remat.jax.planning import FlatFunction, Wishes, step_of

    loss, parameters, batch = jax_models.gpt(layers=13)
    leaves = Leaves.of((parameters, *batch), {})
    wishes = Wishes(parse_budget("1GiB"))
    began = time.perf_counter()
    step = step_of(FlatFunction(loss, leaves, False), leaves.chosen((0,)), wishes.options)
    model = model_of(step)
    _, solution = propose(step, model, 30 << 20, Asked())
    assert len(model.contracted.graph.ops) > 850 and solution.schedule is not None
    assert time.perf_counter() - began < 15
