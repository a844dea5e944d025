"""When each op runs.

A schedule lists ops in the order in which they are computed, recomputations included. Frees are implied:
a version of a value is live from its computation to its last use before its next recomputation (to the end
for the last version of an output; a version with no use only while it is computed). So is overwriting: an op writes its
output into an input that it may overwrite (`Op.overwrites`) wherever it is the last to read that version.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from remat.core.graph import Graph, OpId


@dataclass(frozen=True, slots=True)
class Schedule:
    steps: tuple[OpId, ...]

    def recomputed(self) -> dict[OpId, int]:
        """How many times each op runs beyond its first run; ops that run once are left out."""
        return {op: count - 1 for op, count in Counter(self.steps).items() if count > 1}


def plain_schedule(graph: Graph) -> Schedule:
    """Every op that computes once, in the graph's order: what training does without Remat."""
    return Schedule(tuple(OpId(number) for number, op in enumerate(graph.ops) if op.transfer is None))
