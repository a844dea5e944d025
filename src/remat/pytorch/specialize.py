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
    _propagate(graph, tangents, {tangents[number] for number in absent})
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _has_effect(node))
    graph.lint()
    return GraphModule(joint, graph)


def _propagate(graph: Graph, tangents: list[Node], absent: set[Node]) -> None:
    incoming = set(tangents)
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


def _is_plain_sum(node: Node, missing: Node) -> bool:
    """Whether `node` is `missing + other` with the other's shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    other = next(item for item in node.all_input_nodes if item is not missing)
    here, there = node.meta["val"], other.meta["val"]
    return here.shape == there.shape and here.dtype == there.dtype


def _zeros(graph: Graph, before: Node, like: Node) -> Node:
    value: Any = like.meta["val"]
    with graph.inserting_before(before):
        zeros = graph.call_function(
            aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device}
        )
    with value.fake_mode:
        zeros.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return zeros


def _has_effect(node: Node) -> bool:
    """Random ops move a generator and mutating ops change something: both run even if nobody reads their result."""
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)
