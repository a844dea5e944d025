"""The portfolio: quick answers first, then better ones and proofs for as long as there is time.

In: a problem. Out: a placement that fits the capacity, or without one the lowest found; with the bound that was proven.
Greedy orders answer in a moment and are often as low as the load, which proves them. The exact search takes most of
what they leave open; local search takes what is too large for it.
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

EXACT_SHARE = 0.7
"""Of the time; the rest is for local search."""
LOWEST_SHARE, LOWEST_S = 0.1, 10.0
"""Of the time, and at most: for the lowest placement where nothing fits."""
ORDERS = (Order.SIZE, Order.AREA, Order.LOAD, Order.LIFE, Order.START)
FEW_ORDERS, MANY_BUFFERS = ORDERS[:2], 5_000
"""Above this many buffers only the best orders are tried: local search gains more in the same time."""


@final
@dataclass(frozen=True, slots=True)
class LayoutAuto:
    name: str = "auto"
    gap: float = 0.0
    """Without a capacity: stop once proven to be within this share of the lowest placement."""
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
        share = 1.0 if problem.capacity is None else 1.0 - LOWEST_SHARE
        limits = {"time_limit_s": share * time_limit_s, "gap": self.gap}
        quest = Quest(problem, self.name, progress=progress, clock=self.clock, **limits)
        pursue(quest, seed)
        if not problem.fits(quest.height):
            left = time_limit_s - (self.clock() - start)
            self._lower(quest, min(left, LOWEST_S), seed)
        return quest.answer()

    def _lower(self, quest: Quest, time_limit_s: float, seed: int) -> None:
        """What does not fit is still worth knowing at its lowest: it says which capacity would do."""
        problem = replace(quest.problem, capacity=None)
        lowest = Quest(problem, self.name, time_limit_s=time_limit_s, gap=self.gap, clock=self.clock)
        lowest.offer(quest.offsets, self.name)
        lowest.prove(quest.bound, self.name)
        pursue(lowest, seed)
        quest.offer(lowest.offsets, self.name)
        quest.prove(lowest.bound, self.name)


def pursue(quest: Quest, seed: int) -> None:
    """Offer placements and bounds to `quest`, the cheapest first."""
    _try_orders(quest)
    search_exactly(quest, seed, time_limit_s=EXACT_SHARE * quest.left_s())
    improve(quest, seed)
    search_exactly(quest, seed + 1, time_limit_s=quest.left_s())


def _try_orders(quest: Quest) -> None:
    """Offer what greedy orders give; the first is always finished, so that there is an answer."""
    is_large = len(quest.problem.buffers) > MANY_BUFFERS
    for tightest in (False,) if is_large else (False, True):
        for order in FEW_ORDERS if is_large else ORDERS:
            is_first = order is ORDERS[0] and not tightest
            if quest.stop() and not is_first:
                return
            stop = None if is_first else quest.stop
            offsets = fill(quest.problem, arrange(quest.problem, order), tightest=tightest, stop=stop)
            if offsets is not None:
                quest.offer(offsets, order.value)
