"""The large buffers first: a step has hundreds of small ones, which make the search long and the arena no higher.

In: an incumbent. Out: placements offered to it. The smallest buffers that together never take more than a share of the
load are set aside, the others are searched as a problem of their own, and the small ones go into the gaps that are
left, or on top. With fewer buffers and fewer times, the exact search ends where it would not end with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.layout.base import LayoutIncumbent
from remat.layout.bounds import load
from remat.layout.packing.shelf import Shelf
from remat.layout.problem import LayoutProblem

SMALL_SHARES = (0.05, 0.02, 0.005, 0.002)
"""Of the load: what is small takes at most this. A large share makes the search short, a small one wastes less."""
FEWEST_SMALL_SHARE = 0.1
"""Of the buffers: with fewer small ones the search would be as long as that of all."""


def place_large_first(
    incumbent: LayoutIncumbent, search: Callable[[LayoutIncumbent], None], *, time_limit_s: float
) -> None:
    """Offer placements to `incumbent`; `search` is how the large buffers are placed."""
    limit = time_limit_s / len(SMALL_SHARES)
    whole, known = incumbent.problem, set[int]()
    for share in SMALL_SHARES:
        large = large_buffers(whole, share)
        count = len(large)
        if incumbent.stop() or count > (1 - FEWEST_SMALL_SHARE) * len(whole.buffers) or count in known:
            continue
        known.add(count)
        problem = LayoutProblem(tuple(whole.buffers[number] for number in large), whole.capacity)
        own = LayoutIncumbent(problem, incumbent.solver, incumbent.limits.within(min(limit, incumbent.left_s())))
        search(own)
        incumbent.offer(with_small(whole, large, own.best), "large first")


def large_buffers(problem: LayoutProblem, share: float) -> list[int]:
    """All buffers but the smallest, of which as many are left out as never take more than `share` of the load."""
    buffers, limit = problem.buffers, share * load(problem)
    order = sorted(range(len(buffers)), key=lambda number: buffers[number].size)
    low, high = 0, len(order)
    while low < high:
        middle = (low + high + 1) // 2
        if load(LayoutProblem(tuple(buffers[number] for number in order[:middle]))) <= limit:
            low = middle
        else:
            high = middle - 1
    return sorted(order[low:])


def with_small(problem: LayoutProblem, large: Sequence[int], offsets: Sequence[int]) -> list[int]:
    """Offsets for all: those of `large` as they are, the others into the lowest gaps, the largest of them first."""
    buffers = problem.buffers
    shelf, found = Shelf(len(buffers)), [-1] * len(buffers)
    for number, offset in zip(large, offsets, strict=True):
        found[number] = offset
        shelf.put(buffers[number], offset)
    small = [number for number in range(len(buffers)) if found[number] < 0]
    for number in sorted(small, key=lambda number: (-buffers[number].size, buffers[number].lower)):
        found[number] = shelf.lowest_gap(buffers[number])
        shelf.put(buffers[number], found[number])
    return found
