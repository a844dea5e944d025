"""A joint graph for a step in which some outputs receive no gradient.

A model that returns a loss and logits gets a gradient for the loss alone. Eager PyTorch then computes nothing for
the logits; the joint graph, traced for every output, would add a tensor of zeros as large as the logits. Backward is
linear in the incoming gradients, so what depends only on absent ones is absent, and a sum with it is the other term.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from remat.pytorch._compat.fakes import fake_results_through, true_sizes_of_fused_layers
from remat.pytorch._compat.modes import without_autocast
from remat.pytorch._compat.tensors import schema_of
from remat.pytorch.graph.open_sizes import OPEN, shape_args
from remat.pytorch.graph.real_results import corrected, tensors_of, view_strides

aten = torch.ops.aten


def drop_tangents(joint: GraphModule, absent: Collection[int]) -> GraphModule:
    """A copy of `joint` in which the tangents with these numbers are absent; they stay as unused inputs."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    outputs = graph.graph_copy(joint.graph, copied)
    original = next(iter(joint.graph.find_nodes(op="output")))
    output = graph.output(outputs)
    output.meta.update(original.meta)
    tangents = [node for node in graph.nodes if node.op == "placeholder" and "tangents" in str(node.target)]
    lay_out_again(graph, _propagate(graph, tangents, {tangents[number] for number in absent}))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _has_effect(node))
    graph.lint()
    return GraphModule(joint, graph)


def _propagate(graph: Graph, tangents: list[Node], absent: set[Node]) -> set[Node]:
    """Take out what depends on absent gradients alone; nodes that stand for a sum now and are laid out otherwise."""
    incoming, turned = set(tangents), set[Node]()
    for node in list(graph.nodes):
        if node.op == "output":
            node.args = (tuple(None if item in absent else item for item in node.args[0]),)
            continue
        sources = [item for item in node.all_input_nodes if item in incoming]
        if node.op != "call_function" or not sources:
            continue
        incoming.add(node)
        missing = [item for item in sources if item in absent]
        if len(missing) == len(sources):
            absent.add(node)
        elif missing and not _is_plain_sum(node, missing[0]):
            for item in missing:
                node.replace_input_with(item, _zeros(graph, node, item))
        elif missing:
            other = next(item for item in sources if item not in absent)
            node.replace_all_uses_with(other)
            if other.meta["val"].stride() != node.meta["val"].stride():
                turned.add(other)
    return turned


def lay_out_again(graph: Graph, turned: set[Node]) -> None:
    """Follow the strides of `turned` through the graph; where a view no longer fits, eager's reshape copies."""
    for node in list(graph.nodes) if turned else ():
        if node.op != "call_function" or turned.isdisjoint(node.all_input_nodes):
            continue
        if node.target is aten.view.default and not _can_view(node.args[0].meta["val"], node.meta["val"].shape):
            _copy_before(graph, node)
        node.meta["val"] = _value_of(node)
        turned.add(node)


def _can_view(value: torch.Tensor, shape: Any) -> bool:
    return not value.numel() or bool(view_strides(value.shape, value.stride(), shape))


def _copy_before(graph: Graph, view: Node) -> None:
    with graph.inserting_before(view):
        copy = graph.call_function(aten.clone.default, view.args[:1], {"memory_format": torch.contiguous_format})
    copy.meta = {**view.meta, "val": _value_of(copy)}
    view.args = (copy, *view.args[1:])


def _value_of(node: Node) -> Any:
    """What `node` gives for what its arguments stand for now."""

    def value(item: Node) -> Any:
        return item.meta["val"]

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    modes = (item.fake_mode for item in tensors_of(args) if hasattr(item, "fake_mode"))
    with next(modes), without_autocast(), fake_results_through(corrected), true_sizes_of_fused_layers():
        return node.target(*args, **kwargs)


def _is_plain_sum(node: Node, missing: Node) -> bool:
    """Whether `node` is `missing + other` with the other's shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    other = next(item for item in node.all_input_nodes if item is not missing)
    here, there = node.meta["val"], other.meta["val"]
    return here.shape == there.shape and here.dtype == there.dtype


def _zeros(graph: Graph, before: Node, like: Node) -> Node:
    value: Any = like.meta["val"]
    shape = shape_args(before, value, like.meta.get(OPEN))
    with graph.inserting_before(before):
        zeros = graph.call_function(aten.full.default, (shape, 0), {"dtype": value.dtype, "device": value.device})
    zeros.meta.update({OPEN: like.meta[OPEN]} if OPEN in like.meta else {})
    with value.fake_mode:
        zeros.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return zeros


def _has_effect(node: Node) -> bool:
    """Random ops move a generator and mutating ops change something: both run even if nobody reads their result."""
    schema = schema_of(node.target)
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)
