"""What a kernel of its own reads is computed where it stands, and not when that kernel is about to run.

In: one half of a step. Out: the same, with marks. Inductor writes out a pointwise chain when somebody needs it in
memory. The gradient of a normalization stands before what backward makes again for the convolution that reads both:
were it written out after that, all that the chain reads would wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import runs_alone
from remat.inductor._compat.kernels import COMPUTED_HERE
from remat.pytorch.graph.nodes import is_view


def keep_places(half: GraphModule) -> None:
    """See the module's docstring."""
    place = places(list(half.graph.nodes))
    for node in place:
        if _is_chain(node) and any(_is_kernel(reader) and place[reader] > place[node] for reader in readers(node)):
            node.meta[COMPUTED_HERE] = True


def places(nodes: list[Node]) -> dict[Node, int]:
    """For each node, how many kernels that run alone come before it."""
    place, count = {}, 0
    for node in nodes:
        place[node] = count
        count += _is_kernel(node)
    return place


def readers(node: Node) -> Iterator[Node]:
    """Who reads it, through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


def _is_kernel(node: Node) -> bool:
    return node.op == "call_function" and not is_view(node) and runs_alone(node)


def _is_chain(node: Node) -> bool:
    is_tensor = node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
    return is_tensor and not is_view(node) and not runs_alone(node)
