"""The same step without Remat: what eager PyTorch would need to run a captured graph's ops.

In: a problem as it was captured. Out: the problem where nothing is overwritten, where dropout on CPU keeps what it
multiplies by, as wide as its input, and not a mask of bytes, where max pooling keeps its input and indices of eight
bytes and a ReLU its result, and where the gradient of a loss is made for all rows at once. Its plain schedule has the
peak of plain training.
"""

from __future__ import annotations

from dataclasses import replace

from remat.core.problem import Problem

DROPOUT_MASK = "remat.dropout_mask.default"
LOSS_BACKWARD = "remat.cross_entropy_backward.default"
POOL = "remat.max_pool2d.default"
POOL_BACKWARD = "remat.max_pool2d_backward.default"
RELU_MASK = "remat.relu_mask.default"
RELU_BACKWARD = "remat.relu_backward.default"
INDEX_BYTES = 8
_WITHOUT_WORKSPACE = (POOL, POOL_BACKWARD, RELU_MASK, RELU_BACKWARD)


def as_eager(problem: Problem) -> Problem:
    problem = _with_what_eager_keeps(without_overwrites(problem))
    ops, sizes = problem.graph.ops, list(problem.costs.size_bytes)
    masks = {value for op in ops if op.target == DROPOUT_MASK for value in op.outputs}
    for op in ops if masks else ():
        for mask in masks.intersection(op.inputs):
            sizes[mask] = max(sizes[value] for value in op.outputs)
    workspace = tuple(
        sizes[op.outputs[0]] if op.target == LOSS_BACKWARD else 0 if op.target in _WITHOUT_WORKSPACE else need
        for op, need in zip(ops, problem.costs.workspace_bytes, strict=True)
    )
    return replace(problem, costs=replace(problem.costs, size_bytes=tuple(sizes), workspace_bytes=workspace))


def _with_what_eager_keeps(problem: Problem) -> Problem:
    """Backward ops of pools and ReLUs read what eager's read; what they read instead has eager's size."""
    ops, sizes = list(problem.graph.ops), list(problem.costs.size_bytes)
    makers = {op.outputs[-1]: op for op in ops if op.target in (POOL, RELU_MASK)}
    if not makers:
        return problem
    for value, maker in makers.items():
        sizes[value] = sizes[value] * INDEX_BYTES if maker.target == POOL else 0
    for number, op in enumerate(ops):
        if op.target in (POOL_BACKWARD, RELU_BACKWARD):
            kept = (value for made in op.inputs if made in makers for value in makers[made].inputs)
            ops[number] = replace(op, inputs=tuple(dict.fromkeys((*op.inputs, *kept))))
    graph = replace(problem.graph, ops=tuple(ops))
    return replace(problem, graph=graph, costs=replace(problem.costs, size_bytes=tuple(sizes)))


def without_overwrites(problem: Problem) -> Problem:
    """The same problem where every output has memory of its own."""
    if not any(op.overwrites for op in problem.graph.ops):
        return problem
    ops = tuple(replace(op, overwrites=()) for op in problem.graph.ops)
    return replace(problem, graph=replace(problem.graph, ops=ops))
