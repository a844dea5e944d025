"""The exact solver: searches for placements below chosen heights, and proofs that there are none.

In: a problem. Out: a placement with a bound, proven optimal or infeasible if time allows. Several heights are tried
side by side, because a lower one than needed leaves less to choose and is often easier: the bound, the height that must
be reached or refuted, and one in between. Every height is searched with several tastes for a few nodes each, then for
more and more; what failed is remembered, so that nothing is searched twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import final

from remat.layout.base import LayoutProgress, Quest
from remat.layout.greedy import fill
from remat.layout.grid import Grid, make_grid
from remat.layout.orders import Order, arrange
from remat.layout.problem import LayoutProblem, Placement
from remat.layout.search import FEWEST_WAYS, LOWEST, NARROWEST, TIGHT_FIRST, Outcome, Prefer, Search, Taste

TASTES = (
    Taste(FEWEST_WAYS, Prefer.FIT),
    Taste(FEWEST_WAYS, Prefer.SIZE),
    Taste(NARROWEST, Prefer.LENGTH),
    Taste(LOWEST, Prefer.FIT),
    Taste(TIGHT_FIRST, Prefer.SIZE),
    Taste(NARROWEST, Prefer.AREA),
    Taste(LOWEST, Prefer.AREA),
    Taste(TIGHT_FIRST, Prefer.LENGTH),
)
NOISE = 0.3
"""From the second round on, so that tastes do not repeat themselves."""
GROWTH = 1.5
"""How much longer each round is than the one before."""
MAX_CELLS = 10_000_000
"""Buffers times sections; beyond this a single descent takes longer than it is worth."""


@final
@dataclass(frozen=True, slots=True)
class Exact:
    name: str = "exact"
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
        quest.offer(fill(problem, arrange(problem, Order.SIZE)) or [], "size")
        search_exactly(quest, seed, time_limit_s=quest.left_s())
        return quest.answer()


def search_exactly(quest: Quest, seed: int, *, time_limit_s: float) -> None:
    """Offer placements and bounds to `quest` until it is closed or out of time."""
    reserve_s = quest.left_s() - time_limit_s

    def stop() -> bool:
        return quest.stop() or quest.left_s() <= reserve_s

    if stop():
        return
    grid = make_grid(quest.problem)
    if len(grid.size) * len(grid.load) > MAX_CELLS:
        return
    searches: dict[int, Search] = {}
    for taste, node_limit, number in _attempts(len(grid.size)):
        for height in _heights(quest, grid):
            search = searches.setdefault(height, Search(grid, height, stop=stop))
            _report(quest, search, search.run(taste, node_limit, seed + number))
            if stop():
                return
        wanted = set(_heights(quest, grid))
        searches = {height: search for height, search in searches.items() if height in wanted}


def _attempts(buffers: int) -> Iterator[tuple[Taste, int, int]]:
    """A taste, how many nodes it may take, and a number for its randomness, without end."""
    for round_ in count():
        for number, taste in enumerate(TASTES):
            yield (
                replace(taste, noise=NOISE if round_ else 0.0),
                int(4 * buffers * GROWTH**round_),
                round_ * len(TASTES) + number,
            )


def _heights(quest: Quest, grid: Grid) -> list[int]:
    """The heights to try, in units of the grid: the lowest that may exist, the highest that helps, and one between."""
    capacity = quest.problem.capacity
    lowest = -(-quest.bound // grid.unit)
    highest = (quest.height - 1 if capacity is None else capacity) // grid.unit
    return sorted({lowest, (lowest + highest) // 2, highest})


def _report(quest: Quest, search: Search, outcome: Outcome) -> None:
    unit = search.grid.unit
    if outcome is Outcome.FOUND:
        quest.offer([search.offsets[number] * unit for number in range(len(search.grid.size))], "exact")
    elif outcome is Outcome.REFUTED:
        quest.prove((search.capacity + 1) * unit, "exact")
