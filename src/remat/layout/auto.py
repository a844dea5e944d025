"""The portfolio: quick answers first, then better ones and proofs for as long as there is time.

In: a problem. Out: a placement that fits the capacity, or without one the lowest found; with the bound that was proven.
Greedy orders answer in a moment and are often as low as the load, which proves them. The exact search takes most of
what they leave open; of a training step's buffers it takes the large ones alone; local search takes what is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from remat.core.search.limits import Countdown, Limits
from remat.layout.base import LayoutIncumbent, LayoutProgress
from remat.layout.packing.coarse import place_large_first
from remat.layout.packing.exact import search_exactly
from remat.layout.packing.greedy import MANY_BUFFERS, fill, offer_order
from remat.layout.packing.local_search import improve
from remat.layout.packing.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement

FIRST_SHARE, LARGE_SHARE, EXACT_SHARE = 0.1, 0.4, 0.5
"""Of the time left: for a first exact search, for the large buffers alone, for a longer one; then local search."""
LOWEST_SHARE, LOWEST_S = 0.1, 10.0
"""Of the time, and at most: for the lowest placement where nothing fits."""
ORDERS = (Order.SIZE, Order.AREA, Order.LOAD, Order.LIFE, Order.START)
FEW_ORDERS = ORDERS[:2]
"""Of many buffers only the best orders are tried: local search gains more in the same time."""


@final
@dataclass(frozen=True, slots=True)
class LayoutAuto:
    name: str = "auto"
    gap: float = 0.0
    """Without a capacity: stop once proven to be within this share of the lowest placement, or within the limits'."""

    def solve(
        self, problem: LayoutProblem, limits: Limits, progress: Callable[[LayoutProgress], None] | None = None
    ) -> Placement:
        limits = replace(limits, gap=max(self.gap, limits.gap))
        countdown = Countdown(limits)
        share = 1.0 if problem.capacity is None else 1.0 - LOWEST_SHARE
        incumbent = LayoutIncumbent(problem, self.name, limits.within(share * limits.time_limit_s), progress)
        pursue(incumbent)
        if not problem.fits(incumbent.value):
            self._lower(incumbent, min(countdown.left_s(), LOWEST_S))
        return incumbent.answer()

    def _lower(self, incumbent: LayoutIncumbent, time_limit_s: float) -> None:
        """What does not fit is still worth knowing at its lowest: it says which capacity would do."""
        problem = replace(incumbent.problem, capacity=None)
        lowest = LayoutIncumbent(problem, self.name, incumbent.limits.within(time_limit_s))
        lowest.offer(incumbent.best, self.name)
        lowest.raise_bound(incumbent.bound, self.name)
        pursue(lowest)
        incumbent.offer(lowest.best, self.name)
        incumbent.raise_bound(lowest.bound, self.name)


def pursue(incumbent: LayoutIncumbent) -> None:
    """Offer placements and bounds to `incumbent`, the cheapest first."""
    seed = incumbent.limits.seed

    def search_large(own: LayoutIncumbent) -> None:
        time_limit_s = EXACT_SHARE * own.left_s()
        _try_orders(own)
        search_exactly(own, seed, time_limit_s=time_limit_s)
        improve(own)

    _try_orders(incumbent)
    search_exactly(incumbent, seed, time_limit_s=FIRST_SHARE * incumbent.left_s())
    if len(incumbent.problem.buffers) <= MANY_BUFFERS:
        place_large_first(incumbent, search_large, time_limit_s=LARGE_SHARE * incumbent.left_s())
    search_exactly(incumbent, seed + 1, time_limit_s=EXACT_SHARE * incumbent.left_s())
    improve(incumbent)
    search_exactly(incumbent, seed + 2, time_limit_s=incumbent.left_s())


def _try_orders(incumbent: LayoutIncumbent) -> None:
    """Offer what greedy orders give; the first comes with an answer in any case."""
    is_large = len(incumbent.problem.buffers) > MANY_BUFFERS
    offer_order(incumbent, ORDERS[0])
    for tightest in (False,) if is_large else (False, True):
        for order in FEW_ORDERS if is_large else ORDERS:
            if incumbent.stop():
                return
            if order is ORDERS[0] and not tightest:
                continue
            offsets = fill(incumbent.problem, arrange(incumbent.problem, order), tightest=tightest, stop=incumbent.stop)
            if offsets is not None:
                incumbent.offer(offsets, order.value)
