"""What is padded twice, once turned round, is padded once.

In: a joint graph. Out: the same, in which pads of one tensor and of its turned views are views of one pad. Inductor
pads matmuls whose sizes are no multiples of what a GPU likes, each by itself: the gradient of logits over 50,265 words
is read by two matmuls, and would be in memory three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

_PAD, _PERMUTE = torch.ops.aten.constant_pad_nd.default, torch.ops.aten.permute.default

Turned = tuple[Node, tuple[int, ...]]
"""A tensor, and the order of its dimensions in which it is read."""
Key = tuple[Node, tuple[int, ...], object]
"""What is padded, by how much, and with what."""


def pad_once(module: GraphModule) -> None:
    """See the module's docstring."""
    groups: dict[Key, list[tuple[Node, tuple[int, ...]]]] = {}
    for node in module.graph.find_nodes(op="call_function", target=_PAD):
        if isinstance(node.meta.get("val"), torch.Tensor) and all(isinstance(size, int) for size in node.args[1]):
            source, order = _turned(node.args[0])
            value = node.args[2] if len(node.args) > 2 else 0
            groups.setdefault((source, _pads_of_source(node.args[1], order), value), []).append((node, order))
    alike = {key: found for key, found in groups.items() if len({order for _, order in found}) > 1}
    for (source, pads, value), found in alike.items():
        _merge(module, source, pads, value, found)
    if alike:
        module.recompile()


def _turned(node: Node) -> Turned:
    order = tuple(range(node.meta["val"].dim()))
    while node.target is _PERMUTE:
        dims = [dim % len(order) for dim in node.args[1]]
        order = tuple(dims[place] for place in order)
        node = node.args[0]
    return node, order


def _pads_of_source(pads: Sequence[int], order: tuple[int, ...]) -> tuple[int, ...]:
    """Two for each dimension of what is turned, in its own order; torch lists them from the last dimension on."""
    rank = len(order)
    found = [0] * (2 * rank)
    for place, dim in enumerate(order):
        start = 2 * (rank - 1 - place)
        before_and_after = (*pads[start : start + 2], 0, 0)[:2]
        found[2 * (rank - 1 - dim) : 2 * (rank - dim)] = before_and_after
    return tuple(found)


def _merge(
    module: GraphModule, source: Node, pads: tuple[int, ...], value: object, found: list[tuple[Node, tuple[int, ...]]]
) -> None:
    first, _ = found[0]
    with module.graph.inserting_before(first):
        padded = _call(module, first, _PAD, source, list(pads), value)
        for node, order in found:
            turned = padded
            if order != tuple(range(len(order))):
                turned = _call(module, node, _PERMUTE, padded, list(order))
            node.replace_all_uses_with(turned)
    for node, _ in found:
        module.graph.erase_node(node)


def _call(module: GraphModule, like: Node, op: Any, source: Node, *args: object) -> Node:
    made = module.graph.call_function(op, (source, *args))
    made.meta = {**like.meta, "val": op(source.meta["val"], *args)}
    return made
