"""A layout problem as the exact search reads it: sections, and sets of buffers as the bits of integers.

Which buffers lie in a section, begin no earlier or end no later than a time are one mask each, so that "the unplaced
buffers that cover this section and lie within that valley" is three ands, however many buffers there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from operator import or_

from remat.layout.packing.sections import find_sections
from remat.layout.problem import LayoutProblem

Mask = int


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes and alignments are in units of `unit`, which divides every size."""

    unit: int
    first: tuple[int, ...]
    end: tuple[int, ...]
    size: tuple[int, ...]
    alignment: tuple[int, ...]
    has_alignment: bool
    covering: tuple[Mask, ...]
    """For each section, the buffers alive in it."""
    crossing: tuple[Mask, ...]
    """For each section, the buffers alive in it and in the next one."""
    from_: tuple[Mask, ...]
    """For each time, the buffers that do not begin before it."""
    until: tuple[Mask, ...]
    """For each time, the buffers that do not end after it."""
    load: tuple[int, ...]

    @property
    def everything(self) -> Mask:
        return (1 << len(self.size)) - 1


def make_grid(problem: LayoutProblem) -> Grid:
    sections = find_sections(problem)
    # Heights of stacks are sums of sizes, so they are multiples of the unit; with alignments in play they are not.
    aligned = any(buffer.alignment > 1 for buffer in problem.buffers)
    common = gcd(*(buffer.size for buffer in problem.buffers))
    unit = 1 if aligned and any(common % buffer.alignment for buffer in problem.buffers) else max(common, 1)
    size = tuple(buffer.size // unit for buffer in problem.buffers)
    begin, close = [0] * (sections.count + 1), [0] * (sections.count + 1)
    change = [0] * (sections.count + 1)
    for number, (first, end) in enumerate(zip(sections.first, sections.end, strict=True)):
        begin[first] |= 1 << number
        close[end] |= 1 << number
        change[first] += size[number]
        change[end] -= size[number]
    until = tuple(accumulate(close, or_))
    from_ = tuple(reversed(list(accumulate(reversed(begin), or_))))
    born = list(accumulate(begin, or_))
    covering = tuple(born[at] & ~until[at] for at in range(sections.count))
    return Grid(
        unit=unit,
        first=sections.first,
        end=sections.end,
        size=size,
        alignment=tuple(buffer.alignment if unit == 1 else 1 for buffer in problem.buffers),
        has_alignment=unit == 1 and aligned,
        covering=covering,
        crossing=(*(one & other for one, other in pairwise(covering)), 0),
        from_=from_,
        until=until,
        load=tuple(accumulate(change[:-1])),
    )


def members(mask: Mask) -> Iterator[int]:
    """The numbers of the buffers in `mask`."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
