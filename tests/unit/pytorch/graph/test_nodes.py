"""What single nodes say of themselves, to the reader of eager steps and to the reader of compiled ones alike."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed
from torch.fx import Graph, GraphModule, Node

from remat.inductor.model.joint import Joint, read_joint
from remat.pytorch._compat.averaged_norm import AVERAGED_BATCH_NORM
from remat.pytorch.graph.capture import Captured, capture
from remat.pytorch.graph.nodes import draws, is_collective, may_run_twice, module_of, mutated_inputs

aten = torch.ops.aten
COLLECTIVES = {
    "of c10d": ("_c10d_functional", "all_reduce", ("sum", "0")),
    "waiting for c10d": ("_c10d_functional", "wait_tensor", ()),
    "of DTensor": ("_dtensor", "shard_dim_alltoall", (0, 1, "0")),
    "of symmetric memory": ("symm_mem", "one_shot_all_reduce", ("sum", "0")),
}


def node_of(target: Any, *args: Any, **meta: Any) -> Node:
    graph = Graph()
    node = graph.call_function(target, (graph.placeholder("primals_1"), *args))
    node.meta.update(meta)
    return node


def collective(kind: str) -> tuple[Any, tuple[Any, ...]]:
    if not distributed.is_available():
        pytest.skip("torch without distributed")
    pytest.importorskip("torch.distributed._functional_collectives")
    namespace, name, args = COLLECTIVES[kind]
    return getattr(getattr(torch.ops, namespace), name).default, args


def joint_module(target: Any, *args: Any) -> GraphModule:
    """A sine, `target` and a sum in the forward; the backward reads what `target` made."""
    graph = Graph()

    def noted(node: Node, *shape: int) -> Node:
        node.meta["val"] = torch.empty(shape, device="meta")
        return node

    primal, tangent = noted(graph.placeholder("primals_1"), 4, 4), noted(graph.placeholder("tangents_1"))
    sine = noted(graph.call_function(aten.sin.default, (primal,)), 4, 4)
    made = noted(graph.call_function(target, (sine, *args)), 4, 4)
    loss = noted(graph.call_function(aten.sum.default, (made,)))
    gradient = noted(graph.call_function(aten.mul.Tensor, (made, tangent)), 4, 4)
    graph.output((loss, gradient))
    return GraphModule({}, graph)


def read_both(target: Any, *args: Any) -> tuple[Captured, Joint]:
    return capture(joint_module(target, *args), 1), read_joint(joint_module(target, *args), 1)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_run_once_in_eager_and_in_compiled_steps(kind: str) -> None:
    target, args = collective(kind)
    assert is_collective(node_of(target, *args))
    captured, joint = read_both(target, *args)
    # Waiting is no op of an eager graph: it makes nothing.
    assert not any(op.recomputable for op in captured.graph.ops if op.target == str(target))
    assert [node.recomputable for node in joint.nodes if node.target == str(target)] == [False]


def test_what_only_computes_may_run_again_in_both() -> None:
    captured, joint = read_both(aten.cos.default)
    assert not is_collective(node_of(aten.cos.default))
    assert [op.recomputable for op in captured.graph.ops if op.target == "aten.cos.default"] == [True]
    assert [node.recomputable for node in joint.nodes if node.target == "aten.cos.default"] == [True]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['step'].__self__.layers.0", "layers.0"),
        ("L['step'].__self__._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self'].layers[2]", "layers.2"),
        ("L['step'].__self__", ""),
        ("layers.1.attention", "layers.1.attention"),
    ],
)
@pytest.mark.parametrize("key", ["nn_module_stack", "fwd_nn_module_stack"])
def test_modules_are_named_as_the_user_names_them(path: str, name: str, key: str) -> None:
    stack = {"outer": ("L['step'].__self__", object), "inner": (path, object)}
    assert module_of(node_of(aten.sin.default, **{key: stack})) == name


def test_a_node_of_no_module_has_no_name() -> None:
    assert module_of(node_of(aten.sin.default)) == ""


def test_what_draws_is_told_by_its_tag() -> None:
    assert draws(node_of(aten.native_dropout.default, 0.5, True))
    assert not draws(node_of(aten.sin.default))


@pytest.mark.parametrize(("dropout", "is_drawn"), [((), False), ((0.0,), False), ((0.1,), True)])
def test_attention_draws_where_it_drops_out(dropout: tuple[float, ...], is_drawn: bool) -> None:
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("query", "key", "value")]
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert draws(graph.call_function(op, (*given, *dropout))) is is_drawn
    assert draws(graph.call_function(op, tuple(given), {"dropout_p": sum(dropout)})) is is_drawn


@pytest.mark.parametrize(
    "target", [aten.add_.Tensor, aten.nonzero.default, aten._local_scalar_dense.default, torch.sin]
)
def test_what_writes_or_depends_on_data_or_is_unknown_does_not_run_again(target: Any) -> None:
    assert not may_run_twice(node_of(target), frozenset())


def test_batch_norm_runs_again_although_its_statistics_were_updated_and_not_where_its_input_was() -> None:
    graph = Graph()
    input, mean, variance, batches = (graph.placeholder(f"primals_{number}") for number in range(1, 5))
    legit = aten._native_batch_norm_legit_functional.default
    training = graph.call_function(legit, (input, None, None, mean, variance, True, 0.1, 1e-5))
    averaging = graph.call_function(AVERAGED_BATCH_NORM, (input, None, None, mean, variance, batches, 1e-5))
    for node in (training, averaging):
        assert may_run_twice(node, frozenset((mean, variance, batches)))
        assert not may_run_twice(node, frozenset((input, mean)))
    evaluating = graph.call_function(legit, (input, None, None, mean, variance, False, 0.1, 1e-5))
    assert not may_run_twice(evaluating, frozenset((mean,)))


def test_inputs_are_updated_by_copies_in_the_graph_or_by_what_it_returns() -> None:
    graph = Graph()
    copied, returned, read = (graph.placeholder(f"primals_{number}") for number in (1, 2, 3))
    for number, node in enumerate((copied, returned, read)):
        node.meta["desc"] = f"input {number}"
    made = graph.call_function(aten.sin.default, (read,))
    graph.call_function(aten.copy_.default, (copied, made))
    output = graph.output((made, made))
    output.meta["desc"] = (SimpleNamespace(mutated_input="input 1"), SimpleNamespace())
    found = mutated_inputs(graph)
    assert found == {copied, returned}
    reader = graph.call_function(aten.cos.default, (returned,))
    assert not may_run_twice(reader, found) and may_run_twice(made, found)


def test_views_of_inputs_that_are_written_to_change_with_them() -> None:
    graph = Graph()
    buffer, other = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    view = graph.call_function(aten.view.default, (buffer, [4]))
    part = graph.call_function(operator.getitem, (graph.call_function(aten.split.Tensor, (view, 2)), 0))
    readers = [graph.call_function(aten.sin.default, (node,)) for node in (part, view, other)]
    graph.call_function(aten.copy_.default, (buffer, readers[2]))
    graph.output(tuple(readers))
    found = mutated_inputs(graph)
    assert {buffer, view, part} <= found and other not in found
    assert [may_run_twice(reader, found) for reader in readers] == [False, False, True]
