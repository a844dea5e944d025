"""Sizes that a graph leaves open, as arguments of its ops.

A graph that was traced for many shapes stands for one of them: its nodes' fake results are of that shape, and what was
traced is kept beside each. Here sizes of a result become numbers where they are the same in every shape, and nodes that
compute them from the graph's inputs where they are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from remat.pytorch._compat.symbols import expression_of, is_open, node_for

OPEN = "open"
"""Where nodes keep what was traced of them with sizes left open."""
SIZE = torch.ops.aten.sym_size.int


def shape_args(node: Node, value: torch.Tensor, traced: Any = None) -> list[Any]:
    """The shape of `value`, a result of `node`, for an op that takes its place or comes right before it."""
    return size_args(node, value.shape, _traced_like(node, value, traced, "shape"))


def stride_args(node: Node, value: torch.Tensor, traced: Any = None) -> list[Any]:
    """The same of its strides."""
    return size_args(node, value.stride(), _traced_like(node, value, traced, "stride"))


def _traced_like(node: Node, value: torch.Tensor, traced: Any, what: str) -> Iterable[Any]:
    found = node.meta.get(OPEN) if traced is None else traced
    if not isinstance(found, torch.Tensor):
        return value.shape if what == "shape" else value.stride()
    return found.shape if what == "shape" else found.stride()


def size_args(node: Node, numbers: Iterable[int], traced: Iterable[Any]) -> list[Any]:
    """`numbers` as they are where they are the same in every shape."""
    found = []
    for number, size in zip(numbers, traced, strict=True):
        expression = expression_of(size)
        found.append(int(number) if isinstance(expression, int) else _computed(node, expression))
    return found


def _computed(node: Node, expression: Any) -> Node:
    graph = node.graph
    told = told_by_inputs(graph)
    before = set(graph.nodes)
    with graph.inserting_before(node):
        made: Node = node_for(graph, expression, told)
    for item in graph.nodes:
        if item not in before:
            item.meta["val"] = item.target(*map_arg(item.args, lambda argument: argument.meta["val"]))
    return made


def told_by_inputs(graph: Graph) -> dict[Any, Node]:
    """For each size that is left open, a node near the graph's start that has it."""
    inputs = list(graph.find_nodes(op="placeholder"))
    told: dict[Any, Node] = {}
    for node in inputs:
        traced = node.meta.get(OPEN)
        if isinstance(traced, torch.SymInt):
            told[expression_of(traced)] = node
    for node in inputs:
        traced = node.meta.get(OPEN)
        for dim, size in enumerate(traced.shape if isinstance(traced, torch.Tensor) else ()):
            name = expression_of(size)
            if not isinstance(name, int) and name.is_Symbol and name not in told:
                told[name] = _size_node(graph, inputs[-1], node, dim)
    return told


def _size_node(graph: Graph, last: Node, tensor: Node, dim: int) -> Node:
    known = (item for item in tensor.users if item.target is SIZE and item.args == (tensor, dim))
    found = next(known, None)
    if found is None:
        with graph.inserting_after(last):
            found = graph.call_function(SIZE, (tensor, dim))
        found.meta["val"] = int(tensor.meta["val"].shape[dim])
    return found


def settle_numbers(graph: Graph) -> None:
    """Have every size that ops take computed from inputs alone: none may need a tensor that comes and goes."""
    for node in list(graph.nodes):
        traced = node.meta.get(OPEN)
        if node.op != "call_function" or not isinstance(traced, torch.SymInt) or not is_open(traced):
            continue
        if any(not isinstance(item.meta.get(OPEN), torch.SymInt) for item in node.all_input_nodes):
            if node.target is SIZE and node.args[0].op == "placeholder":
                continue
            node.replace_all_uses_with(_computed(node, expression_of(traced)))
            graph.erase_node(node)
