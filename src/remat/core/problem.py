"""A graph, what it costs, and how much memory it may use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from remat.core.graph import Graph
from remat.errors import BudgetError, InvalidGraph

LARGEST_BYTES = 2**62
"""Sums of sizes beyond this are refused: they would not survive 64-bit solver libraries."""
_WANTED = "it must be a number from 0 to 2**62"


@dataclass(frozen=True, slots=True)
class Costs:
    """What each op and value costs on one device.

    `time_ns` is nanoseconds for captured graphs and the file's own unit for instance files.
    `workspace_bytes` is memory an op needs only while it runs, beyond its inputs and outputs; it is negative where
    outputs are known to take the place of inputs (see `solvers/schedule/overwrite.py`).
    """

    time_ns: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    size_bytes: tuple[int, ...]
    copy_ns: tuple[float, ...] = ()
    """For each op, how long the copy takes that it begins, beside whatever else runs; empty where there are none."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Find the fastest schedule of `graph` whose peak, `resident_bytes` included, stays within `budget_bytes`."""

    graph: Graph
    costs: Costs
    budget_bytes: int
    resident_bytes: int = 0
    """Parameters, buffers, inputs, optimizer state: in memory for the whole step."""
    host_budget_bytes: int = LARGEST_BYTES
    """What copies on the host may take together."""

    def __post_init__(self) -> None:
        _check(self)

    def with_budget(self, budget_bytes: int) -> Problem:
        return replace(self, budget_bytes=budget_bytes)

    @property
    def base_time_ns(self) -> float:
        """The time of computing every op once: what any schedule costs at least."""
        if not self.costs.copy_ns:
            return sum(self.costs.time_ns)
        rows = zip(self.graph.ops, self.costs.time_ns, strict=True)
        return sum(time for op, time in rows if op.transfer is None)


def op_need_bytes(problem: Problem, number: int) -> int:
    """Live bytes while op `number` runs with nothing else in memory: no schedule runs it with less."""
    op = problem.graph.ops[number]
    size = problem.costs.size_bytes
    return (
        problem.resident_bytes
        + problem.costs.workspace_bytes[number]
        + sum(size[value] for value in op.inputs)
        + (0 if op.overwrites else sum(size[value] for value in op.outputs))
    )


def floor_bytes(problem: Problem) -> tuple[int, int]:
    """The largest `op_need_bytes` and the op that sets it: a lower bound on every peak."""
    if not problem.graph.ops:
        return problem.resident_bytes, -1
    needs = [op_need_bytes(problem, number) for number in range(len(problem.graph.ops))]
    worst = max(range(len(needs)), key=needs.__getitem__)
    return needs[worst], worst


def _check(problem: Problem) -> None:
    graph, costs = problem.graph, problem.costs
    lengths = (len(costs.time_ns), len(costs.workspace_bytes), len(costs.size_bytes))
    if lengths != (len(graph.ops), len(graph.ops), graph.value_count):
        raise InvalidGraph(f"Costs have lengths {lengths}, the graph has {len(graph.ops)} ops; measure this graph.")
    for kind, numbers in (("time", costs.time_ns), ("workspace", costs.workspace_bytes), ("size", costs.size_bytes)):
        if all(map(_is_amount, numbers)):
            continue
        for position, number in enumerate(numbers):
            if not _is_amount(abs(number) if kind == "workspace" else number):
                raise InvalidGraph(f"The {kind} at position {position} is {_named(number)}; {_WANTED}.")
    for op in graph.ops:
        if op.overwrites and any(costs.size_bytes[value] != costs.size_bytes[op.outputs[0]] for value in op.overwrites):
            raise InvalidGraph(f"`{op.name}` overwrites a value of another size than its output; the sizes must agree.")
    if costs.copy_ns and (len(costs.copy_ns) != len(graph.ops) or not all(map(_is_amount, costs.copy_ns))):
        raise InvalidGraph(f"There are {len(costs.copy_ns)} times of copies; there must be one for each op, from 0.")
    if not _is_amount(problem.resident_bytes):
        raise InvalidGraph(f"`resident_bytes` is {_named(problem.resident_bytes)}; {_WANTED}.")
    if not -math.inf < problem.budget_bytes < math.inf:
        raise BudgetError(f"The budget is {problem.budget_bytes} bytes; it must be a finite number.")
    if sum(costs.size_bytes) + sum(costs.workspace_bytes) + problem.resident_bytes > LARGEST_BYTES:
        raise InvalidGraph("Sizes add up to more than 2**62 bytes; state them in a larger unit.")


def _is_amount(number: float) -> bool:
    # The comparison is false for NaN and safe for integers too long for a float.
    return 0 <= number <= LARGEST_BYTES


def _named(number: float) -> str:
    # Python refuses to write integers of many thousand digits.
    return "negative" if number < 0 else "too large" if number > LARGEST_BYTES else str(number)
