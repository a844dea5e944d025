"""Regions that users checkpoint, as Dynamo writes them into its graphs: an op that is handed the region's graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

CHECKPOINTED = torch.ops.higher_order.tag_activation_checkpoint


def run_checkpoints_as_eager(module: GraphModule) -> None:
    """Make a graph that will run as it is recompute its regions as eager does, in place.

    Torch's own op leaves it to a compiler to draw the same random numbers again: without one, gradients of dropout are
    those of another mask.
    """
    for graph_module, found in _regions(module):
        for node in found:
            node.target = _checkpointed
        graph_module.recompile()


def has_checkpoints(module: GraphModule) -> bool:
    return any(_regions(module))


def _regions(module: GraphModule) -> Iterator[tuple[GraphModule, list[Node]]]:
    """The graphs that have some, with the ops that are regions."""
    for graph_module in module.modules():
        if isinstance(graph_module, GraphModule):
            found = [node for node in graph_module.graph.nodes if node.target is CHECKPOINTED]
            if found:
                yield graph_module, found


def _checkpointed(region: GraphModule, *args: Any, **kwargs: Any) -> Any:
    if "_checkpoint_context_fn" in region.meta:
        kwargs["context_fn"] = region.meta["_checkpoint_context_fn"]
    return checkpoint(region, *args, **kwargs | {"use_reentrant": False})
