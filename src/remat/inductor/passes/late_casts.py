"""Casts of gradients that nobody waits for, put off until backward is over.

In: a joint graph. Out: the same in another order. Under autocast a matmul gives the gradient of a weight in half
precision, which is then cast to the weight's own. Right behind its matmul, the larger one is in memory for all that is
left of backward; at the end, where activations are gone, it costs no more to make.
"""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import is_cast, runs_alone
from remat.pytorch.graph.nodes import is_view


def put_off_casts(module: GraphModule, num_forward_outputs: int) -> None:
    """See the module's docstring."""
    output = module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple)), "a joint graph returns a list"
    moved = [_cast_and_views(result) for result in results[num_forward_outputs:] if isinstance(result, Node)]
    for node in (node for chain in moved for node in chain):
        output.prepend(node)
    if any(moved):
        module.recompile()


def _cast_and_views(result: Node) -> list[Node]:
    """The cast that a gradient comes from, with the views behind it, where nobody else reads any of them."""
    behind: list[Node] = []
    node = result
    while _is_view_of_one(node):
        behind.insert(0, node)
        node = node.all_input_nodes[0]
    is_late = is_cast(node) and len(node.users) == 1 and _grows(node) and _is_made_alone(node.all_input_nodes[0])
    return [node, *behind] if is_late else []


def _is_view_of_one(node: Node) -> bool:
    return is_view(node) and len(node.users) == 1 and len(node.all_input_nodes) == 1


def _grows(node: Node) -> bool:
    after, before = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    return isinstance(after, Tensor) and isinstance(before, Tensor) and after.itemsize > before.itemsize


def _is_made_alone(node: Node) -> bool:
    """Whether a kernel of its own leaves this in memory, for this reader only."""
    reader = node
    while _is_view_of_one(node):
        reader, node = node, node.all_input_nodes[0]
    is_read_once = len(node.users) == 1 or reader.target is operator.getitem
    return node.op == "call_function" and is_read_once and runs_alone(node)
