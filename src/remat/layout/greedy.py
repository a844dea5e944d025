"""Greedy solvers: buffers in some order, each into the lowest or the tightest gap that is free for its whole life."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from remat.layout.base import LayoutProgress, Quest
from remat.layout.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement
from remat.layout.shelf import Shelf

CHECK_EVERY = 256
"""Buffers between two looks at the clock."""


@final
@dataclass(frozen=True, slots=True)
class Greedy:
    name: str
    order: Order
    tightest: bool = False
    """Take the smallest gap that is large enough (best fit) instead of the lowest one (first fit)."""
    clock: Callable[[], float] = time.monotonic

    def solve(
        self,
        problem: LayoutProblem,
        *,
        time_limit_s: float,
        seed: int = 0,
        progress: Callable[[LayoutProgress], None] | None = None,
    ) -> Placement:
        """One pass, which takes its time whatever the limit: there would be no answer without it."""
        quest = Quest(problem, self.name, time_limit_s=time_limit_s, progress=progress, clock=self.clock)
        offsets = fill(problem, arrange(problem, self.order), tightest=self.tightest)
        if offsets is not None:
            quest.offer(offsets, self.name)
        return quest.answer()


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
