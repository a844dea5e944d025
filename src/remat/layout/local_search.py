"""Local search over orders: what ends up too high is placed earlier next time ("squeaky wheel optimization").

In: a problem. Out: the lowest placement met. A placement is made from an order by first fit; the buffers that reach
above the height wanted move forward by a random distance, and the search starts again from its best order when it
has wandered without success.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from remat.layout.base import LayoutProgress, Quest
from remat.layout.greedy import fill
from remat.layout.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement

PATIENCE = 60
"""Orders without success before the search returns to its best one."""


@final
@dataclass(frozen=True, slots=True)
class LocalSearch:
    name: str = "local_search"
    rounds: int = 2_000
    """The most orders that are tried."""
    clock: Callable[[], float] = time.monotonic

    def solve(
        self,
        problem: LayoutProblem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[LayoutProgress], None] | None = None,
    ) -> Placement:
        quest = Quest(problem, self.name, time_limit_s=time_limit_s, progress=progress, clock=self.clock)
        improve(quest, seed, self.rounds)
        return quest.answer()


def improve(quest: Quest, seed: int, rounds: int) -> None:
    """Offer placements to `quest` until it is closed, out of time, or `rounds` orders were tried."""
    problem, draw = quest.problem, random.Random(seed)
    orders = {order: arrange(problem, order) for order in Order}
    heights = {}
    for order, numbers in orders.items():
        heights[order] = _try(quest, numbers)
        if quest.stop():
            return
    best = orders[min(heights, key=lambda order: heights[order])]
    lowest, current, idle = min(heights.values()), best, 0
    offsets = fill(problem, current) or []
    for _ in range(rounds):
        if quest.stop():
            return
        current = _moved(problem, current, offsets, max(quest.problem.capacity or 0, quest.bound), draw)
        offsets = fill(problem, current, stop=lambda: quest.left_s() <= 0) or []
        if not offsets:
            return
        quest.offer(offsets, quest.solver)
        height = max(at + problem.buffers[number].size for number, at in enumerate(offsets))
        if height < lowest:
            best, lowest, idle = current, height, 0
            continue
        idle += 1
        if idle >= PATIENCE:
            current, idle = best, 0
            offsets = fill(problem, current) or []


def _try(quest: Quest, order: list[int]) -> int:
    """The height of first fit in `order`, offered to `quest`."""
    offsets = fill(quest.problem, order) or []
    quest.offer(offsets, quest.solver)
    return max((at + quest.problem.buffers[number].size for number, at in enumerate(offsets)), default=0)


def _moved(problem: LayoutProblem, order: list[int], offsets: list[int], wanted: int, draw: random.Random) -> list[int]:
    """`order` with every buffer that ends above `wanted` moved forward."""
    place = {number: float(at) for at, number in enumerate(order)}
    reach = max(1, len(order) // 4)
    for number in order:
        if offsets[number] + problem.buffers[number].size > wanted:
            place[number] -= draw.randint(1, reach) + 0.5
    return sorted(order, key=place.__getitem__)
