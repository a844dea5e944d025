"""The portfolio: quick answers first, then better ones and proofs for as long as there is time.

In: a problem. Out: a placement that fits the capacity, or without one the lowest found; with the bound that was proven.
Greedy orders answer in a moment and are often as low as the load, which proves them. What they leave open is given to
the exact search, and problems too large for it to local search.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from remat.layout.base import LayoutProgress, Quest
from remat.layout.exact import search_exactly
from remat.layout.greedy import fill
from remat.layout.local_search import improve
from remat.layout.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement

ROUNDS = 10_000
"""Orders that local search tries on a problem too large for the exact search."""

FALLBACK_SHARE, FALLBACK_S = 0.1, 10.0
"""Of the time, and at most: for the lowest placement where nothing fits."""


@final
@dataclass(frozen=True, slots=True)
class LayoutAuto:
    name: str = "auto"
    clock: Callable[[], float] = time.monotonic

    def solve(
        self,
        problem: LayoutProblem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[LayoutProgress], None] | None = None,
    ) -> Placement:
        start = self.clock()
        share = 1.0 if problem.capacity is None else 1.0 - FALLBACK_SHARE
        quest = Quest(problem, self.name, time_limit_s=share * time_limit_s, progress=progress, clock=self.clock)
        _pursue(quest, seed)
        if problem.fits(quest.height):
            return quest.answer()
        # What does not fit is still worth knowing at its lowest: it says which capacity would do.
        left = time_limit_s - (self.clock() - start)
        lowest = Quest(replace(problem, capacity=None), self.name, time_limit_s=min(left, FALLBACK_S), clock=self.clock)
        lowest.offer(quest.offsets, self.name)
        lowest.prove(quest.bound, self.name)
        _pursue(lowest, seed)
        quest.offer(lowest.offsets, self.name)
        quest.prove(lowest.bound, self.name)
        return quest.answer()


def _pursue(quest: Quest, seed: int) -> None:
    try_orders(quest)
    search_exactly(quest, seed)
    improve(quest, seed, ROUNDS)


def try_orders(quest: Quest) -> None:
    """Offer what every greedy order gives; the first is always finished, so that there is an answer."""
    for tightest in (False, True):
        for order in (Order.SIZE, Order.AREA, Order.LOAD, Order.LIFE, Order.START):
            is_first = order is Order.SIZE and not tightest
            if quest.stop() and not is_first:
                return
            stop = None if is_first else quest.stop
            offsets = fill(quest.problem, arrange(quest.problem, order), tightest=tightest, stop=stop)
            if offsets is not None:
                quest.offer(offsets, order.value)
