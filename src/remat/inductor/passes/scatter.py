"""A gradient that is scattered into zeros and then added to another is scattered into that.

In: a joint graph. Out: the same, without the zeros. Where words are looked up in the matrix that they are compared
with, its gradient is a sum: of a product, and of rows for the words that were looked up. Inductor would fill a matrix
with zeros, scatter rows into it, and add both in a third: three of the largest tensors of many models, when backward is
all but over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import op_name

_ADD, _FULL = torch.ops.aten.add.Tensor, torch.ops.aten.full.default
_PUT = ("index_put", "_unsafe_index_put")
_MASKED_PUT = "_unsafe_masked_index_put_accumulate"


def scatter_into_terms(module: GraphModule) -> None:
    """See the module's docstring."""
    place = {node: number for number, node in enumerate(module.graph.nodes)}
    is_changed = False
    # In order: what is scattered into a term may itself be a term.
    for node in module.graph.find_nodes(op="call_function", target=_ADD):
        for put, term in _terms(node):
            if _is_into_zeros(put) and len(put.users) == 1 and _are_alike(put, term) and place[term] < place[put]:
                _scatter_into(put, term)
                node.replace_all_uses_with(put)
                module.graph.erase_node(node)
                is_changed = True
                break
    if is_changed:
        module.graph.eliminate_dead_code()
        module.recompile()


def _scatter_into(put: Node, term: Node) -> None:
    target: Any = put.target
    put.update_arg(0, term)
    args, kwargs = torch.fx.node.map_arg((put.args, put.kwargs), lambda node: node.meta["val"])
    put.meta["val"] = target(*args, **kwargs)


def _terms(node: Node) -> Iterator[tuple[Node, Node]]:
    """Each of two terms, with the other."""
    one, other = node.args
    if isinstance(one, Node) and isinstance(other, Node) and one is not other and not node.kwargs:
        yield from ((one, other), (other, one))


def _is_into_zeros(node: Node) -> bool:
    name = op_name(node.target)
    is_added = name == _MASKED_PUT or (name in _PUT and len(node.args) > 3 and node.args[3] is True)
    into = node.args[0] if is_added else None
    return isinstance(into, Node) and into.target is _FULL and into.args[1] == 0


def _are_alike(one: Node, other: Node) -> bool:
    value, term = one.meta.get("val"), other.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(term, Tensor):
        return False
    return (value.shape, value.dtype, value.device) == (term.shape, term.dtype, term.device)
