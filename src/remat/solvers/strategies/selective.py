"""Recompute what is cheap for its bytes (norms, activations, dropout, attention scores); keep what is expensive.

Expensive means a matrix product, convolution or fused attention where operators are known, otherwise an op whose time
per byte of output is above the forward's average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.blocks import small_values
from remat.solvers.schedule.keep import first_backward, keep_schedule

EXPENSIVE = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "convolution", "conv", "attention", "einsum", "dot")


@final
@dataclass(frozen=True, slots=True)
class Selective(Strategy):
    name: str = "selective"
    has_one_schedule: ClassVar[bool] = True

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield keep_schedule(problem, kept_values(problem))


def kept_values(problem: Problem) -> frozenset[int]:
    """Outputs of expensive ops, and values too small to be worth dropping."""
    outputs = (value for number in expensive_ops(problem) for value in problem.graph.ops[number].outputs)
    return small_values(problem).union(outputs)


def expensive_ops(problem: Problem) -> list[int]:
    """Forward ops whose outputs are worth their memory."""
    forward = range(first_backward(problem))
    ops, costs = problem.graph.ops, problem.costs
    if any(ops[number].target for number in forward):
        return [number for number in forward if _is_product(ops[number].target)]
    sizes = [sum(costs.size_bytes[value] for value in ops[number].outputs) for number in forward]
    mean = sum(costs.time_ns[number] for number in forward) / max(sum(sizes), 1)
    return [number for number in forward if costs.time_ns[number] > mean * sizes[number]]


def _is_product(target: str) -> bool:
    """`aten.addmm.default` and `aten._scaled_dot_product_flash_attention.default` are, `aten.comm.x` is not."""
    pieces = [piece for part in target.lower().split(".") for piece in part.split("_")]
    return any(piece in EXPENSIVE for piece in pieces)
