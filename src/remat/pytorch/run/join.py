"""The two gradients of a convolution in one call, where there is memory for both.

They are ops of their own so that they need not be in memory at once. oneDNN brings what both read into its own layout
in each call, so that two calls take up to a fifth longer than one: where a schedule runs them one after the other, and
the peak is elsewhere, one call does it. What that call works in is measured: some kernels need a little more for both
than the greedier of the two alone. Libraries of CUDA devices run two kernels either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.pytorch.costs.op_costs import costs_of, op_key
from remat.pytorch.graph.nodes import tensors_in

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


def joined_ops(
    problem: Problem,
    schedule: Schedule,
    nodes: Mapping[OpId, Node | None],
    work_of: Callable[[Node, Node], int] | None = None,
) -> frozenset[OpId]:
    """Ops that can run in one call with the op that follows them, within the schedule's peak.

    `work_of` tells what one call for both works in; left out, it is measured.
    """
    timeline = simulate(problem, schedule)
    counts = Counter(schedule.steps)
    sizes, spaces = problem.costs.size_bytes, problem.costs.workspace_bytes
    found: set[OpId] = set()
    for place, (first, second) in enumerate(zip(schedule.steps, schedule.steps[1:], strict=False)):
        one, other = nodes.get(first), nodes.get(second)
        if counts[first] > 1 or counts[second] > 1 or not _are_gradients_of_one(one, other):
            continue
        assert one is not None and other is not None, "only ops of the graph are gradients of one"
        made = sum(sizes[value] for value in problem.graph.ops[second].outputs)
        room = timeline.peak_bytes - (timeline.live_bytes[place] - spaces[first] + made)
        # No call needs less than the greedier gradient does alone: where that does not fit, nothing is measured.
        if max(spaces[first], spaces[second]) <= room and (work_of or measured_work)(one, other) <= room:
            found.add(first)
    return frozenset(found)


def measured_work(first: Node, second: Node) -> int:
    """Bytes that one call for both gradients works in, besides them."""
    graph = Graph()
    inputs: dict[Node, Node] = {}

    def input_node(item: Node) -> Node:
        if item not in inputs:
            inputs[item] = graph.placeholder(f"input_{len(inputs)}")
            inputs[item].meta["val"] = item.meta["val"]
        return inputs[item]

    both = graph.call_function(CONVOLUTION_BACKWARD, map_arg(joined_args(first, second), input_node))
    both.meta["val"] = [*tensors_in(first.meta["val"]), *tensors_in(second.meta["val"])]
    key = op_key(both)
    return costs_of({key: both}, both.meta["val"][0].device)[key].workspace_bytes


def joined_args(first: Node, second: Node) -> tuple[object, ...]:
    """What the one call takes."""
    *others, mask = first.args
    return (*others, [one or other for one, other in zip(mask, second.args[-1], strict=True)])


def _are_gradients_of_one(first: Node | None, second: Node | None) -> bool:
    if first is None or second is None or not first.target is second.target is CONVOLUTION_BACKWARD:
        return False
    return first.args[:-1] == second.args[:-1]
