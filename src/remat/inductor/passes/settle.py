"""Sums whose terms come one after another, added up as they come.

In: a joint graph. Out: the same, in which `remat::settled` stands behind some additions. Every layer of a decoder reads
what the encoder returns, so its gradient is a sum with terms from every layer. Inductor would hold all terms and add
them up in one kernel at the end. Part of that kernel stands early in the graph, so it would also run early, with all
that it needs; gradients of weights that stand between, and what they read, would wait for its end. Where nobody reads a
sum for a while and it is smaller than its terms, it is computed in its place, by a kernel of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import lower_to_own_kernel
from remat.inductor.model.joint import after_tangents
from remat.inductor.model.program import FAR_APART
from remat.inductor.passes.places import places, readers
from remat.pytorch.graph.nodes import is_view

LEAST_BYTES = 2**20
"""Sums below this are not worth a kernel."""

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("settled(Tensor source) -> Tensor")
_library.impl("settled", lambda source: source.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("remat::settled", lib=_library)
def _fake_settled(source: Tensor) -> Tensor:
    return torch.empty_like(source)


SETTLED = torch.ops.remat.settled.default
lower_to_own_kernel(SETTLED)


def settle_sums(module: GraphModule) -> None:
    """See the module's docstring."""
    nodes = list(module.graph.nodes)
    place = places(nodes)
    backward = after_tangents(nodes)
    found = [node for node in nodes if node in backward and _is_sum(node) and _waits(node, place)]
    for node in found:
        settle(node)
    if found:
        module.recompile()


def settle(node: Node) -> None:
    """A kernel of its own computes this."""
    with node.graph.inserting_after(node):
        settled = node.graph.call_function(SETTLED, (node,))
    settled.meta.update({name: value for name, value in node.meta.items() if name != "recompute"})
    node.replace_all_uses_with(settled, delete_user_cb=lambda user: user is not settled)


def _is_sum(node: Node) -> bool:
    """Whether this adds two tensors of its own size that nobody else reads."""
    if node.target is not torch.ops.aten.add.Tensor or len(set(node.all_input_nodes)) != 2:
        return False
    value, terms = node.meta.get("val"), [item.meta.get("val") for item in node.all_input_nodes]
    if not isinstance(value, Tensor) or value.numel() * value.element_size() < LEAST_BYTES:
        return False
    alike = all(isinstance(term, Tensor) and (term.shape, term.dtype) == (value.shape, value.dtype) for term in terms)
    return alike and all(map(_is_read_once, node.all_input_nodes))


def _is_read_once(node: Node) -> bool:
    while is_view(node) and len(node.users) == 1:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and len(node.users) == 1


def _waits(node: Node, place: dict[Node, int]) -> bool:
    found = list(readers(node))
    return bool(found) and min(place[reader] for reader in found) >= place[node] + FAR_APART
