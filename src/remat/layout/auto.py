"""The portfolio: quick answers first, then better ones and proofs for as long as there is time.

In: a problem. Out: a placement that fits the capacity, or without one the lowest found; with the bound that was proven.
Greedy orders answer in a moment and are often as low as the load, which proves them. The exact search takes most of
what they leave open; of a training step's buffers it takes the large ones alone; local search takes what is too large.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from remat.layout.base import LayoutProgress, Quest
from remat.layout.coarse import place_large_first
from remat.layout.exact import search_exactly
from remat.layout.greedy import fill
from remat.layout.local_search import improve
from remat.layout.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement

FIRST_SHARE, LARGE_SHARE, EXACT_SHARE = 0.1, 0.4, 0.5
"""Of the time left: for a first exact search, for the large buffers alone, for a longer one; then local search."""
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
        pursue(quest, seed, self.clock)
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
        pursue(lowest, seed, self.clock)
        quest.offer(lowest.offsets, self.name)
        quest.prove(lowest.bound, self.name)


def pursue(quest: Quest, seed: int, clock: Callable[[], float]) -> None:
    """Offer placements and bounds to `quest`, the cheapest first."""

    def search_large(own: Quest, time_limit_s: float) -> None:
        _try_orders(own)
        search_exactly(own, seed, time_limit_s=EXACT_SHARE * time_limit_s)
        improve(own, seed)

    _try_orders(quest)
    search_exactly(quest, seed, time_limit_s=FIRST_SHARE * quest.left_s())
    if len(quest.problem.buffers) <= MANY_BUFFERS:
        place_large_first(quest, search_large, time_limit_s=LARGE_SHARE * quest.left_s(), clock=clock)
    search_exactly(quest, seed + 1, time_limit_s=EXACT_SHARE * quest.left_s())
    improve(quest, seed)
    search_exactly(quest, seed + 2, time_limit_s=quest.left_s())


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
