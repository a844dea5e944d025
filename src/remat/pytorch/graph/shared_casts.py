"""Parameters that autocast casts once for several uses, as in eager.

In: a graph as Dynamo captured it, and its inputs. Inside an autocast region eager keeps the cast of a parameter for the
next op that wants it, so that the gradients of all its uses are added in the lower precision before they are cast back.
AOTAutograd, whose inputs are no leaves, casts anew for each use and adds in full precision: other bits, and a copy of
the weight for each use. Out: the same graph where a parameter that one region reads more than once is cast by an op of
its own, once. A checkpointed region is looked at by itself; what a fused layer does inside is not seen.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from remat.pytorch._compat.checkpointed import CHECKPOINTED
from remat.pytorch._compat.dynamo import ENTER_AUTOCAST, EXIT_AUTOCAST, LINEAR, SET_GRAD_ENABLED
from remat.pytorch._compat.tensors import is_view

aten = torch.ops.aten
_REMOVABLE = (aten.add.Tensor, aten._to_copy.default)
_RECURRENT = frozenset({"lstm", "gru", "rnn", "rnn_tanh", "rnn_relu"})
_LOWERED: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((functional.linear, LINEAR), (0, 1, 2)),
    **dict.fromkeys((torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.mv, "matmul", "mm", "bmm"), (0, 1)),
    **dict.fromkeys((torch.addmm, torch.baddbmm, torch.conv1d, torch.conv2d, torch.conv3d), (0, 1, 2)),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), (0, 1, 2)),
}
"""Ops that autocast runs in the lower precision, and which of their arguments it casts."""


@dataclass(frozen=True, slots=True)
class _Region:
    """An autocast region: casts are kept until the outermost one ends."""

    number: int
    dtype: torch.dtype | None
    """What it casts to; None where it is off."""


def share_casts(module: GraphModule, inputs: Sequence[Any]) -> None:
    """Change `module` in place."""
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    cached = {node for node, item in zip(placeholders, inputs, strict=False) if _is_cached(item)}
    device_type = next((item.device.type for item in inputs if isinstance(item, torch.Tensor)), "cpu")
    is_on = torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled()
    around = _Region(0, torch.get_autocast_dtype(device_type) if is_on else None)
    _share_casts(module, cached, device_type, around)


def _share_casts(module: GraphModule, cached: set[Node], device_type: str, around: _Region) -> None:
    uses: dict[tuple[Node, int, torch.dtype], list[Node]] = {}
    unrecorded = _without_gradients(module)
    for node, region in _inside_regions(module, device_type, around):
        if node.target is CHECKPOINTED:
            body = module.get_submodule(node.args[0].target)
            inside = (item for item in body.graph.nodes if item.op == "placeholder")
            passed = {item for item, outer in zip(inside, node.args[1:], strict=False) if outer in cached}
            _share_casts(body, passed, device_type, region)
        for place in _LOWERED.get(node.target, ()):
            argument = node.args[place] if place < len(node.args) else None
            if argument in cached and region.dtype is not None:
                uses.setdefault((argument, region.number, region.dtype), []).append(node)
    # What is cast first where no gradients are recorded is left alone.
    shared = {key: nodes for key, nodes in uses.items() if len(nodes) > 1 and unrecorded.isdisjoint(nodes)}
    for (parameter, _, dtype), nodes in shared.items():
        _cast_once(module.graph, parameter, dtype, nodes)
    if shared:
        module.recompile()


def _cast_once(graph: Graph, parameter: Node, dtype: torch.dtype, nodes: Sequence[Node]) -> None:
    """Before the first of the ops that use it."""
    with graph.inserting_before(nodes[0]):
        cast = graph.call_method("to", (parameter, dtype))
    cast.meta = {name: value for name, value in parameter.meta.items() if name != "example_value"}
    for node in nodes:
        node.replace_input_with(parameter, cast)


def _is_cached(item: Any) -> bool:
    """Whether autocast keeps the cast of this tensor."""
    if not isinstance(item, torch.Tensor) or item.dtype is not torch.float32:
        return False
    return item.requires_grad and item.is_leaf and not is_view(item)


def _without_gradients(module: GraphModule) -> set[Node]:
    """Ops that run while gradients are off."""
    found, is_on = set[Node](), True
    for node in module.graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            is_on = bool(node.args[0])
        elif not is_on:
            found.add(node)
    return found


def _inside_regions(module: GraphModule, device_type: str, around: _Region) -> Iterator[tuple[Node, _Region]]:
    """Each op with the region that it runs in."""
    stack, number = [around], 0
    for node in module.graph.nodes:
        if node.target is ENTER_AUTOCAST:
            where, dtype, enabled, cache = node.args
            casts = (dtype or torch.get_autocast_dtype(where)) if enabled and cache is not False else None
            stack.append(_Region(number, casts) if where == device_type else stack[-1])
        elif node.target is EXIT_AUTOCAST:
            stack.pop()
            number += len(stack) == 1 and around.dtype is None
        else:
            yield node, stack[-1]


def share_recurrent_casts(graph: Graph, primals: Sequence[Node], gradients: Sequence[Any]) -> None:
    """The same for weights that a recurrent layer casts at every time step, in a joint graph, in place.

    `gradients` are those of `primals`, one for each.
    """
    for parameter, gradient in zip(primals, gradients, strict=False):
        casts = [user for user in parameter.users if user.target is aten._to_copy.default and _layer_of(user)]
        if len(casts) < 2 or len({_layer_of(cast) for cast in casts}) > 1 or not isinstance(gradient, Node):
            continue
        terms = _terms(gradient)
        if len(terms) != len(casts) or not all(_is_cast_back(term, casts[0]) for term in terms):
            continue
        for cast in casts[1:]:
            cast.replace_all_uses_with(casts[0])
            graph.erase_node(cast)
        _add_before_casting(graph, gradient, terms)


def _layer_of(node: Node) -> str:
    """The call of a recurrent layer that a node comes from; empty for others."""
    for name, source in reversed(node.meta.get("source_fn_stack") or ()):
        if getattr(source, "__name__", str(source)).lower() in _RECURRENT:
            return str(name)
    return ""


def _terms(node: Node) -> list[Node]:
    """What a sum that autograd made adds up, in the order in which it does."""
    is_sum = node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs
    if not is_sum or not all(isinstance(item, Node) and len(item.users) == 1 for item in node.args):
        return [node]
    return [*_terms(node.args[0]), *_terms(node.args[1])]


def _is_cast_back(term: Node, cast: Node) -> bool:
    if term.target is not aten._to_copy.default:
        return False
    made, read = term.meta["val"], term.args[0].meta["val"]
    lowered = cast.meta["val"]
    return made.dtype is torch.float32 and read.dtype is lowered.dtype and read.shape == lowered.shape


def _add_before_casting(graph: Graph, gradient: Node, terms: Sequence[Node]) -> None:
    """Let the sum add what was cast, and cast the sum."""
    options = terms[-1].kwargs
    total = terms[0].args[0]
    with graph.inserting_before(gradient):
        for term in terms[1:]:
            value = total.meta["val"]
            total = graph.call_function(aten.add.Tensor, (total, term.args[0]))
            with value.fake_mode:
                total.meta = {**gradient.meta, "val": torch.empty_like(value)}
        result = graph.call_function(aten._to_copy.default, (total,), options)
    result.meta = dict(gradient.meta)
    gradient.replace_all_uses_with(result)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target not in _REMOVABLE)
