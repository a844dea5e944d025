"""Can every buffer be placed below a capacity? A depth-first search that ends with a placement or a proof.

Each node branches on one spot (see `valley`): the buffers that may lie there, in the order that a `BranchingRule`
prefers, and last the floor that rises without any of them. What hangs together no longer is solved part by part, and a
part that fails is not tried again under other choices elsewhere. States that failed are remembered over restarts and
rules, because what can be completed depends on what is left and on the floors alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import itemgetter

from remat.layout.packing.grid import Grid, Mask, members
from remat.layout.packing.valley import Rank, Spot, State, floor_above, place, raised, root, settle, split

MEMORY_ITEMS = 20_000_000
"""Floors that are remembered in failed states, about 8 bytes each."""


class Prefer(Enum):
    """Which of the candidates for a spot is tried first."""

    SIZE = "size"
    AREA = "area"
    LENGTH = "length"
    FIT = "fit"
    """The one that lies against the valley's walls and ends at their height; among equals the largest area."""


@dataclass(frozen=True, slots=True)
class BranchingRule:
    """How a search chooses; none of it changes what can be found, only when."""

    rank: Rank
    prefer: Prefer
    noise: float = 0.0
    """Up to this share is taken from what makes a candidate preferred, at random."""


class SearchOutcome(Enum):
    FOUND = "found"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Choice:
    """A node: the children that are still to be tried."""

    children: Iterator[State]
    key: tuple[Mask, tuple[int, ...]]


@dataclass(slots=True)
class _Parts:
    """A node whose parts must all succeed."""

    parts: Iterator[State]


@dataclass(slots=True)
class PlacementSearch:
    """The search for one grid and capacity; `run` may be called again and knows what failed before."""

    grid: Grid
    capacity: int
    stop: Callable[[], bool] = lambda: False
    """Asked at every node; a search that is stopped is UNKNOWN."""
    offsets: dict[int, int] = field(default_factory=dict)
    nodes: int = 0
    _failed: set[tuple[Mask, tuple[int, ...]]] = field(default_factory=set)
    _remembered: int = 0

    def run(self, rule: BranchingRule, node_limit: int, seed: int = 0) -> SearchOutcome:
        """Search until an answer or for `node_limit` nodes; `offsets` holds a placement once it is FOUND."""
        start = root(self.grid, self.capacity)
        if min(start.slack, default=0) < 0:
            return SearchOutcome.REFUTED
        weights = _weights(self.grid, rule, random.Random(seed))
        last = self.nodes + node_limit
        stack: list[_Choice | _Parts] = [_Parts(iter(split(self.grid, start)))]
        succeeded: bool | None = None
        while stack:
            node = stack[-1]
            if isinstance(node, _Parts):
                part = next(node.parts, None) if succeeded is not False else None
                if part is None:
                    stack.pop()
                    succeeded = succeeded is not False
                    continue
            else:
                part = next(node.children, None) if not succeeded else None
                if part is None:
                    stack.pop()
                    if not succeeded:
                        self._remember(node.key)
                        succeeded = False
                    continue
                parts = split(self.grid, part)
                if len(parts) != 1:
                    stack.append(_Parts(iter(parts)))
                    succeeded = None
                    continue
                part = parts[0]
            # Asked at every node, because one of a thousand buffers may take a tenth of a second.
            if self.nodes >= last or self.stop():
                return SearchOutcome.UNKNOWN
            self.nodes += 1
            opened = self._open(part, rule, weights)
            succeeded = None if opened is not None else False
            if opened is not None:
                stack.append(opened)
        return SearchOutcome.FOUND if succeeded else SearchOutcome.REFUTED

    def _open(self, state: State, rule: BranchingRule, weights: list[float]) -> _Choice | None:
        """The node of `state`; None if it cannot be completed."""
        key = state.key()
        if key in self._failed:
            return None
        spot = settle(self.grid, state, rule.rank)
        if spot is None:
            self._remember(key)
            return None
        return _Choice(self._children(state, spot, rule, weights), key)

    def _children(self, state: State, spot: Spot, rule: BranchingRule, weights: list[float]) -> Iterator[State]:
        grid = self.grid
        seen = set()
        for number in _in_order(grid, state, spot, rule, weights):
            # Buffers of one life and one size can change places.
            kind = (grid.first[number], grid.end[number], grid.size[number], grid.alignment[number])
            if kind not in seen:
                seen.add(kind)
                self.offsets[number] = spot.height
                yield place(grid, state, number, spot.height)
        if state.slack[spot.at] > 0:
            child = raised(state, spot.at, floor_above(grid, state, spot.left, spot.right, spot.at))
            if child is not None:
                yield child

    def _remember(self, key: tuple[Mask, tuple[int, ...]]) -> None:
        if self._remembered < MEMORY_ITEMS:
            self._remembered += len(key[1])
            self._failed.add(key)


def _weights(grid: Grid, rule: BranchingRule, draw: random.Random) -> list[float]:
    """What makes each buffer preferred."""
    length = [end - first for first, end in zip(grid.first, grid.end, strict=True)]
    plain: list[int] = {
        Prefer.SIZE: list(grid.size),
        Prefer.LENGTH: length,
        Prefer.AREA: [size * long for size, long in zip(grid.size, length, strict=True)],
        Prefer.FIT: [size * long for size, long in zip(grid.size, length, strict=True)],
    }[rule.prefer]
    return [weight * (1 - rule.noise * draw.random()) for weight in plain] if rule.noise else list(map(float, plain))


def _in_order(grid: Grid, state: State, spot: Spot, rule: BranchingRule, weights: list[float]) -> list[int]:
    candidates = list(members(spot.candidates))
    if rule.prefer is not Prefer.FIT:
        return sorted(candidates, key=weights.__getitem__, reverse=True)
    left, right = spot.left, spot.right
    left_wall = state.floor[left - 1] - spot.height if left else 0
    right_wall = state.floor[right] - spot.height if right < len(state.floor) else 0

    def fit(number: int) -> tuple[int, float]:
        score, size = 0, grid.size[number]
        if grid.first[number] == state.start + left:
            score += 3 if size == left_wall else 1
        if grid.end[number] == state.start + right:
            score += 3 if size == right_wall else 1
        return score, weights[number]

    return sorted(candidates, key=fit, reverse=True)


WAYS, HEIGHT, SLACK, WIDTH, HAS_SLACK = range(5)
FEWEST_WAYS: Rank = itemgetter(WAYS, HEIGHT, SLACK)
LOWEST: Rank = itemgetter(HEIGHT, WAYS, SLACK)
NARROWEST: Rank = itemgetter(WIDTH, WAYS, HEIGHT)
TIGHT_FIRST: Rank = itemgetter(HAS_SLACK, WAYS, HEIGHT)
