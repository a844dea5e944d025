"""A captured graph whose values may travel to the host and back.

In: a `Captured`, and which of its values travel. Out: one with the ops that move them at the end of its list, which run
no FX node. `can_move` says which values may: tensors of this graph alone, that lie on its device and that nobody
outside of it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from remat.core.copies import graph_with_copies
from remat.core.graph import ValueId
from remat.pytorch._compat.fakes import FakeTensor
from remat.pytorch.graph.capture import Captured

LEAST_BYTES = {"cuda": 2**20, "cpu": 2**12}
"""Smaller values stay: beginning a copy costs the host as much as launching a few kernels."""


def with_moves(captured: Captured, values: Sequence[ValueId]) -> Captured:
    """See the module's docstring."""
    if not values:
        return captured
    graph = graph_with_copies(captured.graph, values)
    new_ops, new_values = len(graph.ops) - len(captured.op_nodes), graph.value_count - len(captured.size_bytes)
    return replace(
        captured,
        graph=graph,
        size_bytes=(*captured.size_bytes, *(0 for _ in range(new_values))),
        asked_bytes=(*captured.asked_bytes, *(0 for _ in range(new_values))),
        op_nodes=(*captured.op_nodes, *(None for _ in range(new_ops))),
        value_nodes=(*captured.value_nodes, *(None for _ in range(new_values))),
    )


def can_move(captured: Captured) -> list[ValueId]:
    """Values that may leave the device while no op reads them."""
    least = LEAST_BYTES.get(captured.device.type, LEAST_BYTES["cuda"])
    producers = captured.graph.producers()
    held = {*captured.graph.outputs, *captured.graph.ops[captured.boundary].inputs}
    return [
        ValueId(value)
        for value, (size, node) in enumerate(zip(captured.size_bytes, captured.value_nodes, strict=True))
        if size >= least
        and value not in held
        and captured.op_nodes[producers[value]] is not None
        and node is not None
        and _fills_its_storage(node.meta.get("val"))
    ]


def _fills_its_storage(found: object) -> bool:
    """Whether what is copied, from its first element to its last, is all that there is."""
    if not isinstance(found, FakeTensor) or found.layout is not torch.strided or found.storage_offset():
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(found.shape, found.stride(), strict=True))
    return span * found.element_size() == found.untyped_storage().nbytes()
