"""The same step without Remat: what eager PyTorch would need to run a captured graph's ops.

In: a problem as it was captured. Out: the problem where nothing is overwritten, where dropout on CPU keeps what it
multiplies by, as wide as its input, and not a mask of bytes, and where the gradient of a loss is made for all rows at
once. Its plain schedule has the peak of plain training.
"""

from __future__ import annotations

from dataclasses import replace

from remat.core.problem import Problem

DROPOUT_MASK = "remat.dropout_mask.default"
LOSS_BACKWARD = "remat.cross_entropy_backward.default"


def as_eager(problem: Problem) -> Problem:
    ops, sizes = problem.graph.ops, list(problem.costs.size_bytes)
    masks = {value for op in ops if op.target == DROPOUT_MASK for value in op.outputs}
    for op in ops if masks else ():
        for mask in masks.intersection(op.inputs):
            sizes[mask] = max(sizes[value] for value in op.outputs)
    workspace = tuple(
        sizes[op.outputs[0]] if op.target == LOSS_BACKWARD else need
        for op, need in zip(ops, problem.costs.workspace_bytes, strict=True)
    )
    costs = replace(problem.costs, size_bytes=tuple(sizes), workspace_bytes=workspace)
    return replace(without_overwrites(problem), costs=costs)


def without_overwrites(problem: Problem) -> Problem:
    """The same problem where every output has memory of its own."""
    ops = tuple(replace(op, overwrites=()) for op in problem.graph.ops)
    return replace(problem, graph=replace(problem.graph, ops=ops))
