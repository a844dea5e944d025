"""What attention reads expanded is computed once, at its own size.

In: a joint graph. Out: the same, in which `remat::settled` stands behind the sources of some expanded views. A mask of
one head is read as if every head had one. What is not in memory yet when a library's kernel reads it, Inductor computes
as large as it is read, once for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import op_name, runs_alone
from remat.inductor.passes.settle import LEAST_BYTES, settle
from remat.pytorch.graph.nodes import is_view


def settle_expanded(module: GraphModule) -> None:
    """See the module's docstring."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and "attention" in op_name(node.target)]
    reads = (item for node in nodes for item in node.all_input_nodes)
    sources = dict.fromkeys(source for item in reads for source in _grown_source(item))
    for source in sources:
        settle(source)
    if sources:
        module.recompile()


def _grown_source(read: Node) -> Iterator[Node]:
    """What these views are of, where it is smaller and could be computed within a kernel that reads it."""
    source = read
    while is_view(source) and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    as_read, value = read.meta.get("val"), source.meta.get("val")
    if not isinstance(as_read, Tensor) or not isinstance(value, Tensor):
        return
    grows_by = (as_read.numel() - value.numel()) * value.element_size()
    if grows_by >= LEAST_BYTES and source.op == "call_function" and not runs_alone(source):
        yield source
