"""Buffers that are put down and taken up again: what a local search works on.

Buffers stand in order of their beginnings, so that those alive during a life are a slice of the arrays and a few passes
of numpy over it. Putting down and taking up change one number each.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from remat.layout.problem import LayoutProblem

_FAR = 2**62


class Field:
    def __init__(self, problem: LayoutProblem) -> None:
        lower = np.array([buffer.lower for buffer in problem.buffers], dtype=np.int64)
        self._order = np.argsort(lower, kind="stable")
        self._place = np.empty_like(self._order)
        self._place[self._order] = np.arange(len(self._order))
        self._lower = lower[self._order]
        self._upper = np.array([buffer.upper for buffer in problem.buffers], dtype=np.int64)[self._order]
        self._size = np.array([buffer.size for buffer in problem.buffers], dtype=np.int64)[self._order]
        self._alignment = [problem.buffers[number].alignment for number in self._order]
        self._longest = int((self._upper - self._lower).max(initial=0))
        self._offset = np.full(len(self._order), -1, dtype=np.int64)
        """-1 for what does not lie."""

    def put(self, number: int, offset: int) -> None:
        self._offset[self._place[number]] = offset

    def take_up(self, number: int) -> None:
        self._offset[self._place[number]] = -1

    def offsets(self) -> list[int]:
        """Where each buffer lies, in the problem's order."""
        return [int(offset) for offset in self._offset[self._place]]

    def above(self, height: int) -> list[int]:
        """The buffers that reach above `height`."""
        return [int(number) for number in self._order[self._offset + self._size > height]]

    def lowest_gap(self, number: int, height: int) -> int | None:
        """The lowest offset at which the buffer fits below `height`; None if there is none."""
        me = self._place[number]
        met = self._met(me)
        starts = np.zeros(len(met) + 1, dtype=np.int64)
        np.maximum.accumulate(self._offset[met] + self._size[met], out=starts[1:])
        starts = self._aligned(me, starts)
        fits = np.minimum(np.append(self._offset[met], _FAR), height) - starts >= self._size[me]
        first = int(np.argmax(fits))
        return int(starts[first]) if fits[first] else None

    def cheapest_place(self, number: int, height: int, price: np.ndarray) -> tuple[int, list[int]]:
        """The offset below `height` at which what is in the way has the lowest total price, and what that is."""
        me = self._place[number]
        met, size = self._met(me), int(self._size[me])
        begins, ends = self._offset[met], self._offset[met] + self._size[met]
        prices = price[self._order[met]]
        starts = self._aligned(me, np.concatenate(([0], ends, np.maximum(begins - size, 0))))
        starts = starts[starts + size <= height]
        # What is in the way begins below the end and does not end below the beginning.
        begun = np.concatenate(([0.0], np.cumsum(prices)))[np.searchsorted(begins, starts + size)]
        by_end = np.argsort(ends, kind="stable")
        ended = np.concatenate(([0.0], np.cumsum(prices[by_end])))
        cost = begun - ended[np.searchsorted(ends[by_end], starts, side="right")]
        start = int(starts[np.argmin(cost)])
        in_the_way = met[(begins < start + size) & (ends > start)]
        return start, [int(other) for other in self._order[in_the_way]]

    def _met(self, me: int) -> np.ndarray:
        """The places of what lies and is alive during this life, in order of offset."""
        lower, upper = self._lower[me], self._upper[me]
        first = int(np.searchsorted(self._lower, lower - self._longest))
        last = int(np.searchsorted(self._lower, upper))
        alive = (self._upper[first:last] > lower) & (self._offset[first:last] >= 0)
        if first <= me < last:
            alive[me - first] = False
        met = np.flatnonzero(alive) + first
        return met[np.argsort(self._offset[met], kind="stable")]

    def _aligned(self, me: int, starts: np.ndarray) -> np.ndarray:
        alignment = self._alignment[me]
        return starts if alignment == 1 else -(-starts // alignment) * alignment


def put_all(field: Field, offsets: Iterable[int]) -> None:
    for number, offset in enumerate(offsets):
        field.put(number, offset)
