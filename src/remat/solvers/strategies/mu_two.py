"""Drop the activation with the most bytes · idle time per second of recomputation first (after μ-TWO, 2023).

Idle time is what passes in the plain step between an activation's last use in forward and its first in backward. After
each pick, recomputing what reads it takes longer, since its own op and sources must run too: times are brought up to
date before the next pick. Picks end as soon as the simulated peak fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.activations import Activations, activations_of, drop_in_order

SHORTEST_TIME = 1e-9
"""Seconds that an op takes at least, so that free ops can be compared too."""


@final
@dataclass(frozen=True, slots=True)
class MuTwo(Strategy):
    name: str = "mu_two"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        found = activations_of(problem)
        yield from drop_in_order(problem, found, pick_order(found))


def pick_order(activations: Activations) -> list[int]:
    """All activations, best first."""
    worth = {op: activations.held_bytes[op] * idle for op, idle in idle_times(activations).items()}
    present = activations.present(activations.sources)
    heap = [(_cost(activations, op, present, worth), op) for op in activations.ops]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        stale, op = heapq.heappop(heap)
        # A pick only makes others dearer, so the first whose cost has not changed is the best of all.
        cost = _cost(activations, op, present, worth)
        if cost > stale:
            heapq.heappush(heap, (cost, op))
            continue
        order.append(op)
        for value in activations.flat.outputs[op]:
            present[value] = False
    return order


def _cost(activations: Activations, op: int, present: list[bool], worth: dict[int, float]) -> float:
    return (activations.again_time(op, present) + SHORTEST_TIME) / (worth[op] + SHORTEST_TIME)


def idle_times(activations: Activations) -> dict[int, float]:
    """For each activation, the time between its last use before the turn and its first use from there on."""
    flat, turn = activations.flat, activations.turn
    clock = [0.0, *accumulate(flat.time)]
    last, first = list(range(turn)), [flat.count] * turn
    for op in range(flat.count):
        for producer in {flat.producer[value] for value in flat.inputs[op]}:
            if op < turn:
                last[producer] = op
            elif producer < turn:
                first[producer] = min(first[producer], op)
    return {op: clock[first[op]] - clock[last[op] + 1] for op in activations.ops}
