"""The exact solver: searches for placements below chosen heights, and proofs that there are none.

In: a problem. Out: a placement with a bound, proven optimal or infeasible if time allows. Several heights are tried
side by side, because a lower one than needed leaves less to choose and is often easier: the bound, the height that must
be reached or refuted, and one in between. Every height is searched with several rules for a few nodes each, then for
more and more; what failed is remembered, so that nothing is searched twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import final

from remat.core.search.limits import Limits
from remat.layout.base import LayoutIncumbent, LayoutProgress
from remat.layout.packing.greedy import offer_order
from remat.layout.packing.grid import Grid, make_grid
from remat.layout.packing.orders import Order
from remat.layout.packing.search import (
    FEWEST_WAYS,
    LOWEST,
    NARROWEST,
    TIGHT_FIRST,
    BranchingRule,
    PlacementSearch,
    Prefer,
    SearchOutcome,
)
from remat.layout.packing.sections import find_sections
from remat.layout.problem import LayoutProblem, Placement

BRANCHING_RULES = (
    BranchingRule(FEWEST_WAYS, Prefer.FIT),
    BranchingRule(FEWEST_WAYS, Prefer.SIZE),
    BranchingRule(NARROWEST, Prefer.LENGTH),
    BranchingRule(LOWEST, Prefer.FIT),
    BranchingRule(TIGHT_FIRST, Prefer.SIZE),
    BranchingRule(NARROWEST, Prefer.AREA),
    BranchingRule(LOWEST, Prefer.AREA),
    BranchingRule(TIGHT_FIRST, Prefer.LENGTH),
)
NOISE_SHARE = 0.3
"""From the second round on, so that rules do not repeat themselves."""
ROUND_GROWTH_FACTOR = 1.5
"""How much longer each round is than the one before."""
MAX_CELLS = 10_000_000
"""Buffers times sections; beyond this a single descent takes longer than it is worth."""


@final
@dataclass(frozen=True, slots=True)
class LayoutExact:
    name: str = "exact"

    def solve(
        self, problem: LayoutProblem, limits: Limits, progress: Callable[[LayoutProgress], None] | None = None
    ) -> Placement:
        incumbent = LayoutIncumbent(problem, self.name, limits, progress)
        offer_order(incumbent, Order.SIZE)
        search_exactly(incumbent, limits.seed, time_limit_s=incumbent.left_s())
        return incumbent.answer()


def search_exactly(incumbent: LayoutIncumbent, seed: int, *, time_limit_s: float) -> None:
    """Offer placements and bounds to `incumbent` until it is closed or out of time."""
    reserve_s = incumbent.left_s() - time_limit_s

    def stop() -> bool:
        return incumbent.stop() or incumbent.left_s() <= reserve_s

    if stop():
        return
    sections = find_sections(incumbent.problem)
    # Asked before the grid is made: its masks alone have as many bits as there are cells.
    if len(incumbent.problem.buffers) * sections.count > MAX_CELLS:
        return
    grid = make_grid(incumbent.problem)
    searches: dict[int, PlacementSearch] = {}
    for rule, node_limit, number in _attempts(len(grid.size)):
        for height in _heights(incumbent, grid):
            search = searches.setdefault(height, PlacementSearch(grid, height, stop=stop))
            _report(incumbent, search, search.run(rule, node_limit, seed + number))
            if stop():
                return
        wanted = set(_heights(incumbent, grid))
        searches = {height: search for height, search in searches.items() if height in wanted}


def _attempts(buffers: int) -> Iterator[tuple[BranchingRule, int, int]]:
    """A rule, how many nodes it may take, and a number for its randomness, without end."""
    for round_ in count():
        for number, rule in enumerate(BRANCHING_RULES):
            yield (
                replace(rule, noise=NOISE_SHARE if round_ else 0.0),
                int(4 * buffers * ROUND_GROWTH_FACTOR**round_),
                round_ * len(BRANCHING_RULES) + number,
            )


def _heights(incumbent: LayoutIncumbent, grid: Grid) -> list[int]:
    """The heights to try, in units of the grid: the lowest that may exist, the highest that helps, and one between."""
    capacity = incumbent.problem.capacity
    lowest = -(-incumbent.bound // grid.unit)
    highest = (incumbent.value - 1 if capacity is None else capacity) // grid.unit
    return sorted({lowest, (lowest + highest) // 2, highest})


def _report(incumbent: LayoutIncumbent, search: PlacementSearch, outcome: SearchOutcome) -> None:
    unit = search.grid.unit
    if outcome is SearchOutcome.FOUND:
        incumbent.offer([search.offsets[number] * unit for number in range(len(search.grid.size))], "exact")
    elif outcome is SearchOutcome.REFUTED:
        incumbent.raise_bound((search.capacity + 1) * unit, "exact")
