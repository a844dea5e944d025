"""An answer for any number of buffers in next to no time: what an allocator would do that meets them one by one.

In: a problem. Out: offsets. Time passes from event to event; what ends becomes a gap, joined with the gaps beside it,
and what begins takes the smallest gap that is large enough, or grows the top. Each step looks at a few gaps only, where
a greedy order looks at everything that was placed before.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from remat.layout.problem import LayoutProblem


def sweep(problem: LayoutProblem) -> list[int]:
    """Offsets for all buffers, in the problem's order."""
    gaps, count = _Gaps(), len(problem.buffers)
    sizes = [buffer.size for buffer in problem.buffers]
    offsets = [0] * count
    for event in _events(problem):
        if event < count:
            gaps.give_back(offsets[event], offsets[event] + sizes[event])
        else:
            number = event - count
            offsets[number] = gaps.take(sizes[number], problem.buffers[number].alignment)
    return offsets


def _events(problem: LayoutProblem) -> list[int]:
    """Ends as the number of their buffer, beginnings as that plus the count, in order of time.

    At one time ends come first, so that what begins can take their place, and then large buffers before small ones.
    """
    buffers = problem.buffers
    times = np.array([buffer.upper for buffer in buffers] + [buffer.lower for buffer in buffers], dtype=np.int64)
    size = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    begins = np.repeat(np.array([0, 1]), len(buffers))
    order: list[int] = np.lexsort((-np.concatenate((size, size)), begins, times)).tolist()
    return order


class _Gaps:
    """Free memory below `top`; all above it is free too."""

    def __init__(self) -> None:
        self.top = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []

    def take(self, size: int, alignment: int) -> int:
        """The offset of `size` units in the tightest gap, or on top where there is none."""
        at = bisect_left(self._by_size, (size + alignment - 1, -1))
        if at < len(self._by_size):
            room, start = self._by_size.pop(at)
            end = start + room
            del self._end_of[start], self._start_of[end]
        else:
            start = self._start_of.get(self.top, self.top)
            end = self._remove(start) if start < self.top else start
        offset = start if alignment == 1 else -(-start // alignment) * alignment
        if start < offset:
            self._add(start, offset)
        if offset + size < end:
            self._add(offset + size, end)
        elif offset + size > self.top:
            self.top = offset + size
        return offset

    def give_back(self, start: int, end: int) -> None:
        if end in self._end_of:
            end = self._remove(end)
        if start in self._start_of:
            start = self._start_of[start]
            self._remove(start)
        if end == self.top:
            self.top = start
        else:
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        self._end_of[start], self._start_of[end] = end, start
        insort(self._by_size, (end - start, start))

    def _remove(self, start: int) -> int:
        """Take the gap out; returns its end."""
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        return end
