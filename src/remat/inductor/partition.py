"""The hook into Inductor: a choice of saved values becomes the cut between its forward and its backward.

In: the joint graph that Inductor hands to its partitioner. Out: two graphs. Nodes are marked as saved or as run again,
and torch's own partitioner cuts where the marks say: it keeps mutations in the forward and replays the generator for
random ops that run again. What has no mark is left to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from remat.inductor._compat import CustomPartitioner, CutPolicy, min_cut, without_repeats
from remat.inductor.joint import Joint, read_joint
from remat.inductor.predict import split

Decide = Callable[[Joint, Sequence[Node]], frozenset[int] | None]
"""What to save; None leaves the cut to torch."""


class Partitioner(CustomPartitioner):
    """Asks `decide` once for each joint graph."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._hash = ""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        without_repeats(gm)
        joint = read_joint(gm, options["num_fwd_outputs"])
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        saved = self._decide(joint, nodes)
        if saved is not None:
            self._hash = _hash(joint, saved)
            mark(joint, nodes, saved)
        halves: tuple[GraphModule, GraphModule] = min_cut(gm, joint_inputs, **options)
        return halves

    def uuid(self) -> Any:
        """Part of the key under which Inductor keeps its code."""
        return f"remat {self._hash}"


def mark(joint: Joint, nodes: Sequence[Node], saved: frozenset[int]) -> None:
    """Write into the graph what is saved and what runs again."""
    for node in nodes:
        node.meta.pop("recompute", None)
    for number in split(joint, saved).backward:
        if joint.nodes[number].reads and number not in saved and _is_forward(joint, number):
            nodes[number].meta["recompute"] = CutPolicy.MUST_RECOMPUTE
    for number in saved:
        for item in {number, joint.maker(number)}:
            if nodes[item].meta.get("recompute") is None and nodes[item].op == "call_function":
                nodes[item].meta["recompute"] = CutPolicy.MUST_SAVE


def _is_forward(joint: Joint, number: int) -> bool:
    from remat.inductor.joint import Phase

    return joint.nodes[number].phase is not Phase.BACKWARD


def _hash(joint: Joint, saved: frozenset[int]) -> str:
    names = "\n".join(sorted(joint.nodes[number].name for number in saved))
    return hashlib.sha256(names.encode()).hexdigest()[:24]
