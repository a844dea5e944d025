"""Two small steps on which sharing can be followed by eye: they are drawn in the docs and held by tests.

`exp_of_sum` is exp(a·b + 3), where each result may be written over the one before. `two_layer_mlp` is a training step:
a linear layer, a relu, a linear layer, the mean squared error and their backward, with the sizes of a small batch.
"""

from __future__ import annotations

from remat.core.graph import Graph, Op, ValueId
from remat.core.problem import LARGEST_BYTES, Costs, Problem

_Row = tuple[str, str, str, int]
"""What an op makes, its operator, what it reads (inputs and parameters left out), and the bytes of its result."""


def exp_of_sum(size_bytes: int = 64) -> Problem:
    rows: list[_Row] = [
        ("a·b", "aten.mul.Tensor", "", size_bytes),
        ("a·b+3", "aten.add.Tensor", "a·b", size_bytes),
        ("exp", "aten.exp.default", "a·b+3", size_bytes),
    ]
    return _problem("exp(a·b+3)", rows, "exp", backward_from=len(rows))


def two_layer_mlp(batch: int = 128, width: int = 64, hidden: int = 64, out: int = 16) -> Problem:
    rows: list[_Row] = [
        ("h", "aten.addmm.default", "", 4 * batch * hidden),
        ("r", "aten.relu.default", "h", 4 * batch * hidden),
        ("y", "aten.addmm.default", "r", 4 * batch * out),
        ("loss", "aten.mse_loss.default", "y", 4),
        ("dy", "aten.mse_loss_backward.default", "y", 4 * batch * out),
        ("dW2", "aten.mm.default", "dy r", 4 * hidden * out),
        ("db2", "aten.sum.dim_IntList", "dy", 4 * out),
        ("dr", "aten.mm.default", "dy", 4 * batch * hidden),
        ("dh", "aten.threshold_backward.default", "dr r", 4 * batch * hidden),
        ("dW1", "aten.mm.default", "dh", 4 * width * hidden),
        ("db1", "aten.sum.dim_IntList", "dh", 4 * hidden),
    ]
    return _problem("two-layer MLP", rows, "loss dW2 db2 dW1 db1", backward_from=4)


def _problem(name: str, rows: list[_Row], outputs: str, *, backward_from: int) -> Problem:
    number = {made: ValueId(place) for place, (made, *_) in enumerate(rows)}
    ops = tuple(
        Op(made, tuple(number[value] for value in read.split()), (number[made],), place >= backward_from, target=target)
        for place, (made, target, read, _) in enumerate(rows)
    )
    graph = Graph(ops, len(ops), tuple(number[value] for value in outputs.split()), name)
    sizes = tuple(size for *_, size in rows)
    return Problem(graph, Costs((1.0,) * len(ops), (0,) * len(ops), sizes), LARGEST_BYTES)
