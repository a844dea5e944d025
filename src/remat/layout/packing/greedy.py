"""Greedy solvers: buffers in some order, each into the lowest or the tightest gap that is free for its whole life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from remat.core.search.limits import Limits
from remat.layout.base import LayoutIncumbent, LayoutProgress
from remat.layout.packing.orders import Order, arrange
from remat.layout.packing.shelf import Shelf
from remat.layout.packing.sweep import sweep
from remat.layout.problem import LayoutProblem, Placement

CHECK_EVERY = 256
"""Buffers between two looks at the clock."""
MANY_BUFFERS = 5_000
"""Up to here a greedy order takes less than a second, and is always finished."""


@final
@dataclass(frozen=True, slots=True)
class Greedy:
    name: str
    order: Order
    tightest: bool = False
    """Take the smallest gap that is large enough (best fit) instead of the lowest one (first fit)."""

    def solve(
        self, problem: LayoutProblem, limits: Limits, progress: Callable[[LayoutProgress], None] | None = None
    ) -> Placement:
        """One pass, which takes its time whatever the limit, unless there are many buffers."""
        incumbent = LayoutIncumbent(problem, self.name, limits, progress)
        offer_order(incumbent, self.order, tightest=self.tightest)
        return incumbent.answer()


def offer_order(incumbent: LayoutIncumbent, order: Order, *, tightest: bool = False) -> None:
    """Offer what one greedy order gives. Of many buffers it may take too long; then a sweep makes the first answer."""
    problem = incumbent.problem
    stop = None if len(problem.buffers) <= MANY_BUFFERS else lambda: incumbent.left_s() <= 0
    offsets = fill(problem, arrange(problem, order), tightest=tightest, stop=stop)
    if offsets is not None:
        incumbent.offer(offsets, order.value)
    elif not incumbent.has_placement:
        incumbent.offer(sweep(problem), "sweep")


def fill(
    problem: LayoutProblem,
    order: Sequence[int],
    *,
    tightest: bool = False,
    stop: Callable[[], bool] | None = None,
) -> list[int] | None:
    """The offsets of buffers placed in `order`; None if `stop` said so before all were placed."""
    shelf, offsets = Shelf(len(order)), [0] * len(order)
    choose = shelf.tightest_gap if tightest else shelf.lowest_gap
    for count, number in enumerate(order):
        if stop is not None and count % CHECK_EVERY == 0 and stop():
            return None
        buffer = problem.buffers[number]
        offsets[number] = choose(buffer)
        shelf.put(buffer, offsets[number])
    return offsets
