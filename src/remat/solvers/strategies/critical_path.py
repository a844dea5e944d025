"""Drop activations beside the critical path first, then those on it, each by bytes per second of their own op.

The critical path is the longest chain of forward ops by time: with it in memory, what is computed again branches off
values that are there, and no recomputation waits for another along the longest chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.activations import activations_of, drop_in_order
from remat.solvers.schedule.editable import FlatProblem
from remat.solvers.strategies.benefit_cost import seconds_per_byte


@final
@dataclass(frozen=True, slots=True)
class CriticalPath(Strategy):
    name: str = "critical_path"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        found = activations_of(problem)
        spared = critical_ops(found.flat, found.turn)
        order = sorted(found.ops, key=lambda op: (op in spared, seconds_per_byte(found, op)))
        yield from drop_in_order(problem, found, order)


def critical_ops(flat: FlatProblem, forward: int) -> set[int]:
    """The ops of a longest chain among the first `forward` ops."""
    until, before = [0.0] * forward, [-1] * forward
    for op in range(forward):
        sources = [flat.producer[value] for value in flat.inputs[op]]
        before[op] = max(sources, key=until.__getitem__, default=-1)
        until[op] = flat.time[op] + (until[before[op]] if sources else 0.0)
    path: set[int] = set()
    op = max(range(forward), key=until.__getitem__, default=-1)
    while op >= 0:
        path.add(op)
        op = before[op]
    return path
