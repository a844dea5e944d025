"""Drop the activation with the most bytes · idle time per second of recomputation first (after μ-TWO, 2023).

Idle time is what passes in the plain step between an activation's last use in forward and its first in backward. After
each pick, recomputing what reads it takes longer, since its own op and sources must run too: times are brought up to
date before the next pick. Picks end as soon as the simulated peak fits.

Where values may leave the device, those that are idle for longest are swapped first, as long as their copies are done
by themselves; what still does not fit is dropped as above, as if what is away took no memory. Fewer swaps are tried
too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import final

from remat.core.copies import without_copies
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.limits import Limits
from remat.solvers.base import Strategy
from remat.solvers.schedule.activations import Activations, activations_of, drop_in_order
from remat.solvers.schedule.to_host import fit_by_copies, trips_without_waiting, without_bytes

SWAPPED_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the values whose copies are done by themselves."""
SHORTEST_TIME = 1e-9
"""Seconds that an op takes at least, so that free ops can be compared too."""


@final
@dataclass(frozen=True, slots=True)
class MuTwo(Strategy):
    name: str = "mu_two"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        found = activations_of(problem)
        yield from drop_in_order(problem, found, pick_order(found))

    def schedules_with_copies(
        self, problem: Problem, limits: Limits, raise_bound: Callable[[float], None]
    ) -> Iterator[Schedule]:
        plain = without_copies(problem)
        trips = trips_without_waiting(problem, plain_schedule(plain.graph))
        swapped = [trip.stay.value for trip in sorted(trips, key=lambda trip: trip.stay.last - trip.stay.following)]
        for share in SWAPPED_SHARES:
            lighter = without_bytes(plain, set(swapped[: ceil(share * len(swapped))]))
            for computing in self.schedules(lighter, limits.seed):
                steps = fit_by_copies(problem, computing)
                if steps is not None:
                    yield steps


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
