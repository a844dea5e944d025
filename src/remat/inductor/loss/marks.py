"""Where a joint graph holds the gradients of a chunked loss, so that a partitioner saves them and nothing behind them.

In comes the joint graph that a partitioner gets, out come the nodes of the finished gradients. The last call of
`remat::add_linear_grads` also stands before the loss, so everything behind these nodes belongs to the forward whatever
the partitioner likes; saved without them, it would have to keep all logits or compute them twice.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from remat.inductor.loss import ops as loss_ops  # noqa: F401  defines the ops

_GRADIENTS = ("hidden_grad", "weight_grad", "bias_grad")


def mark_saved(joint: GraphModule) -> list[Node]:
    """The gradients that chunked losses hand to backward; they and what adds them up are marked as never recomputed."""
    calls = [node for node in joint.graph.nodes if _adds_gradients(node)]
    finished = [grad for call in calls for grad in _gradients(call) if not any(map(_adds_gradients, grad.users))]
    for node in (*calls, *finished):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return finished


def _adds_gradients(node: Node) -> bool:
    """A call that changes its arguments is a call of a function with new ones by the time a graph is partitioned."""
    return (
        node.target is torch.ops.higher_order.auto_functionalized_v2
        and node.args[0] is torch.ops.remat.add_linear_grads.default
    )


def _gradients(call: Node) -> list[Node]:
    positions = [call.kwargs.get(f"_{name}_base_index") for name in _GRADIENTS]
    # Position 0 of the results is what the op itself returns: nothing.
    wanted = {position + 1 for position in positions if isinstance(position, int)}
    return [user for user in call.users if user.target is operator.getitem and user.args[1] in wanted]
