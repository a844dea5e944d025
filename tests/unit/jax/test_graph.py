"""Steps of jax as graphs: what is traced, inlined, merged, fused and kept from running twice."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from tests.support.jax_models import gpt, mlp

from remat.core.schedule import plain_schedule
from remat.errors import CaptureError
from remat.jax.graph.capture import JoinedStep, capture, trace
from remat.jax.graph.contract import BOUNDARY, FusedGraph, contract
from remat.jax.graph.program import Constant, module_of

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def captured(function: Any, *avals: Any, wanted: tuple[bool, ...] | None = None) -> JoinedStep:
    return capture(lambda *values: [function(*values)], avals, wanted or (True,) * len(avals))


def fused(function: Any, *avals: Any) -> FusedGraph:
    return contract(captured(function, *avals).program)


def names(step: JoinedStep) -> list[str]:
    return [equation.primitive.name for equation in step.program.equations]


def test_forward_and_backward_are_joined_by_what_forward_saves() -> None:
    step = captured(lambda x: jnp.tanh(x @ x).sum(), X)
    backward = [equation for equation in step.program.equations if equation.backward]
    made_before = {
        number for equation in step.program.equations if not equation.backward for number in equation.outputs
    }
    assert any(made_before.intersection(equation.reads) for equation in backward)
    assert len(step.program.gradients) == 1 and len(step.program.cotangents) == 1


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.named_call])
def test_calls_are_inlined(wrap: Any) -> None:
    found = names(captured(lambda x: wrap(lambda y: jnp.sin(y) * y)(x).sum(), X))
    assert {"jit", "pjit", "checkpoint", "remat2", "custom_jvp_call", "closed_call"}.isdisjoint(found)


def test_custom_derivatives_are_inlined() -> None:
    @jax.custom_jvp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(primals[0]), 2 * jnp.cos(primals[0]) * tangents[0]))
    found = names(captured(lambda x: f(x).sum() + jax.nn.relu(x).sum(), X))
    assert "cos" in found and not any(name.startswith("custom") for name in found)


def test_what_a_user_had_checkpointed_is_computed_once() -> None:
    plain = names(captured(lambda x: jnp.tanh(x @ x).sum(), X))
    checkpointed = names(captured(lambda x: jax.checkpoint(lambda y: jnp.tanh(y @ y))(x).sum(), X))
    assert checkpointed.count("dot_general") == plain.count("dot_general")
    assert checkpointed.count("tanh") == plain.count("tanh") == 1


def test_loops_and_branches_stay_whole() -> None:
    def f(x: Any) -> Any:
        y = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
        n = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        return (y * n).sum()

    graph = fused(f, X).graph
    assert {"cond", "while"} <= {op.target for op in graph.ops}


def test_callbacks_and_collectives_run_once() -> None:
    def f(x: Any) -> Any:
        y = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        return (x * y).sum()

    once = [op for op in fused(f, X).graph.ops if op.target == "pure_callback"]
    assert len(once) == 1 and not once[0].recomputable

    def g(x: Any) -> Any:
        return jax.vmap(lambda row: jax.lax.psum(row, "i"), axis_name="i")(x).sum()

    assert fused(g, X).graph.ops, "an axis that vmap removes is no collective"


def test_effects_are_refused_in_one_sentence() -> None:
    from jax.experimental import io_callback

    def f(x: Any) -> Any:
        io_callback(lambda v: None, None, x)
        return x.sum()

    with pytest.raises(CaptureError, match="has the effect .* which must happen exactly once"):
        trace(f, [X])


def test_a_value_of_an_outer_trace_is_refused() -> None:
    def outer(y: Any) -> Any:
        captured(lambda x: (x * y).sum(), X)
        return y

    with pytest.raises(CaptureError, match="hand it over as an argument"):
        jax.jit(outer)(jnp.ones((8, 8)))


@pytest.mark.parametrize(
    ("scope", "module"),
    [
        ("transpose(jvp(layers.3))/mlp", "layers.3.mlp"),
        ("jvp(Bert)/block0/Dense_0", "Bert.block0.Dense_0"),
        ("/jvp()", ""),
        ("transpose(jvp(checkpoint))/rematted_computation/mlp", "mlp"),
    ],
)
def test_modules_are_the_users_own_names(scope: str, module: str) -> None:
    assert module_of(scope) == module


def test_named_scopes_reach_the_graph() -> None:
    loss, parameters, batch = gpt(layers=2, width=16, length=8, batch=1)
    leaves, tree = jax.tree.flatten((parameters, *batch))
    step = capture(
        lambda *values: [loss(*jax.tree.unflatten(tree, values))],
        [jax.typeof(leaf) for leaf in leaves],
        [leaf.dtype == jnp.float32 for leaf in leaves],
    )
    modules = {op.module for op in contract(step.program).graph.ops}
    assert {"layers.0.attention", "layers.1.mlp"} <= modules


def test_pointwise_chains_are_no_ops_of_their_own() -> None:
    found = fused(lambda x: (jnp.sin(x * 2 + 1) @ x).sum(), X)
    targets = [op.target for op in found.graph.ops]
    assert "mul" not in targets[: found.boundary] and "add" not in targets[: found.boundary]
    assert targets.count("dot_general") >= 2


def test_the_boundary_stands_between_forward_and_backward() -> None:
    found = fused(lambda x: jnp.tanh(x @ x).sum(), X)
    ops = found.graph.ops
    assert ops[found.boundary].name == BOUNDARY and not ops[found.boundary].recomputable
    assert not any(op.backward for op in ops[: found.boundary])
    assert all(op.backward for op in ops[found.boundary + 1 :])
    assert plain_schedule(found.graph).steps[found.boundary] == found.boundary


def test_long_cheap_chains_are_cut() -> None:
    def f(x: Any) -> Any:
        for _ in range(200):
            x = x + 1
            x = x * x
        return x.sum()

    assert max(len(work.equations) for work in fused(f, X).work) < 150


def test_a_constant_gradient_needs_no_op() -> None:
    step = captured(lambda x, y: y.sum(), X, X)
    assert any(isinstance(atom, Constant) or atom not in step.program.arguments for atom in step.program.gradients)


def test_integers_get_no_gradient() -> None:
    loss, parameters, batch = mlp(layers=1)
    step = capture(
        lambda layer, x, n: [loss([layer], x) * n],
        [jax.typeof(parameters[0]), jax.typeof(batch[0]), jax.ShapeDtypeStruct((), jnp.int32)],
        [True, False, False],
    )
    assert len(step.program.gradients) == 1
