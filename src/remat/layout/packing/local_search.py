"""Local search by ejection: what lies too high is put where it displaces the least, and what it displaces goes on.

In: a problem. Out: the lowest placement met. A height is wanted; every buffer above it is taken up. The largest of
those taken up goes into a gap below that height if there is one, and else to where what it meets is cheapest to take up
in turn. What is taken up often becomes dear, so that the search does not go round in circles. Small buffers end the
chains, because they find gaps. A height that is reached is followed by a lower one, one that is not by one between.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from remat.core.search.limits import Limits
from remat.layout.base import LayoutIncumbent, LayoutProgress
from remat.layout.packing.field import Field, put_all
from remat.layout.packing.greedy import offer_order
from remat.layout.packing.orders import Order
from remat.layout.problem import LayoutProblem, Placement

EFFORTS = (1, 4, 16, 64, 256)
"""Buffers put down for each one that lay too high, before a height is given up: little at first, then more."""
LEAST_STEPS = 500
CLOSEST_SHARE = 1e-3
"""The search ends when the heights left to try differ by less than this share."""
DEARER_FACTOR = 1.5
"""How much dearer a buffer becomes each time it is taken up."""


@final
@dataclass(frozen=True, slots=True)
class LocalSearch:
    name: str = "local_search"

    def solve(
        self, problem: LayoutProblem, limits: Limits, progress: Callable[[LayoutProgress], None] | None = None
    ) -> Placement:
        incumbent = LayoutIncumbent(problem, self.name, limits, progress)
        for order in (Order.SIZE, Order.AREA):
            offer_order(incumbent, order)
        improve(incumbent)
        return incumbent.answer()


def improve(incumbent: LayoutIncumbent) -> None:
    """Offer placements to `incumbent` until it is closed, out of time, or much patience finds nothing lower."""
    draw = random.Random(incumbent.limits.seed)
    for effort in EFFORTS:
        # The height that was too low for this search and the one that is reached close in on each other.
        missed = incumbent.bound
        while not incumbent.stop() and incumbent.value - missed > CLOSEST_SHARE * incumbent.value:
            wanted = max((missed + incumbent.value) // 2, incumbent.problem.capacity or 0)
            if not reach(incumbent, min(wanted, incumbent.value - 1), effort, draw):
                missed = wanted


def reach(incumbent: LayoutIncumbent, height: int, effort: int, draw: random.Random) -> bool:
    """Try to bring the best placement of `incumbent` below `height`."""
    problem, field = incumbent.problem, Field(incumbent.problem)
    put_all(field, incumbent.best)
    price = _prices(problem)
    waiting: list[tuple[float, int]] = []
    for number in field.above(height):
        field.take_up(number)
        heapq.heappush(waiting, (-price[number], number))
    for _ in range(effort * (LEAST_STEPS + len(waiting))):
        if not waiting:
            return incumbent.offer(field.offsets(), "local search")
        if incumbent.left_s() <= 0:
            return False
        _, number = heapq.heappop(waiting)
        offset = field.lowest_gap(number, height)
        if offset is None:
            offset, ejected = field.cheapest_place(number, height, price)
            for other in ejected:
                field.take_up(other)
                price[other] *= DEARER_FACTOR + draw.random()
                heapq.heappush(waiting, (-price[other], other))
        field.put(number, offset)
    return False


def _prices(problem: LayoutProblem) -> np.ndarray:
    """What it costs to take each buffer up: large and long ones are hard to put elsewhere."""
    return np.array([float(buffer.size) * (buffer.upper - buffer.lower) for buffer in problem.buffers])
