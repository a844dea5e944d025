"""The two gradients of a convolution in one call, where there is memory for both.

They are ops of their own so that they need not be in memory at once. oneDNN brings what both read into its own layout
in each call, so that two calls take up to a fifth longer than one: where a schedule runs them one after the other, and
the peak is elsewhere, one call does it. Libraries of CUDA devices run two kernels either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch.fx import Node

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


def joined_ops(problem: Problem, schedule: Schedule, nodes: Mapping[OpId, Node | None]) -> frozenset[OpId]:
    """Ops that can run in one call with the op that follows them, within the schedule's peak."""
    timeline = simulate(problem, schedule)
    counts = Counter(schedule.steps)
    sizes, spaces = problem.costs.size_bytes, problem.costs.workspace_bytes
    found: set[OpId] = set()
    for place, (first, second) in enumerate(zip(schedule.steps, schedule.steps[1:], strict=False)):
        if counts[first] > 1 or counts[second] > 1 or not _are_gradients_of_one(nodes.get(first), nodes.get(second)):
            continue
        # One call computes one gradient after the other too: what it works in is that of the one that needs more.
        made = sum(sizes[value] for value in problem.graph.ops[second].outputs)
        more = max(0, spaces[second] - spaces[first])
        if timeline.live_bytes[place] + made + more <= timeline.peak_bytes:
            found.add(first)
    return frozenset(found)


def joined_args(first: Node, second: Node) -> tuple[object, ...]:
    """What the one call takes."""
    *others, mask = first.args
    return (*others, [one or other for one, other in zip(mask, second.args[-1], strict=True)])


def _are_gradients_of_one(first: Node | None, second: Node | None) -> bool:
    if first is None or second is None or not first.target is second.target is CONVOLUTION_BACKWARD:
        return False
    return first.args[:-1] == second.args[:-1]
