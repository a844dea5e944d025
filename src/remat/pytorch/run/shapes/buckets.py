"""Ranges of sizes that share a plan.

In: the sizes of a call. Out: the largest sizes of their bucket, at which its plan is made: whatever grows with a size
is largest there. A bucket ends at the next of `PER_DOUBLING` steps between two powers of two, so that it is never much
larger than what is in it, nor beyond what was declared or what tracing took for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat.pytorch._compat.symbols import Sizes

PER_DOUBLING = 8
SAMPLES = (1.0, 0.5, 0.25, 0.71)
"""Shares of the largest sizes at which ops are measured; the last is off the pattern that the others share."""
SMALLEST = 2
"""torch traces dimensions of one element, or none, apart."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What was declared of an axis of the step's arguments."""

    axis: str
    least: int
    most: int
    size: int = 0
    """In the call under way."""


def limits_of(hints: Sizes, bounds: Sequence[Bound]) -> Sizes | None:
    """The largest sizes that were declared; None where nothing was. One that nobody declared may be twice as large."""
    if not bounds:
        return None
    found = []
    for hint in hints:
        declared = [bound.most for bound in bounds if bound.size == hint]
        found.append(min(declared) if declared else bucket_end(2 * hint))
    return tuple(found)


def bucket_end(size: int) -> int:
    """The largest size of the bucket."""
    step = max(1, (1 << max(1, size - 1).bit_length() - 1) // PER_DOUBLING)
    return -(-size // step) * step


def bucket_of(sizes: Sizes, most: Sizes | None, may_be: Callable[[Sizes], bool]) -> Sizes:
    """The largest sizes of the bucket of `sizes`; themselves where a larger one would be another graph."""
    ends = tuple(map(bucket_end, sizes))
    if most is not None:
        ends = tuple(min(end, limit) for end, limit in zip(ends, most, strict=True))
        ends = tuple(max(end, size) for end, size in zip(ends, sizes, strict=True))
    return ends if may_be(ends) else sizes


def most_sizes(sizes: Sizes, limits: Sizes | None, may_be: Callable[[Sizes], bool]) -> Sizes:
    """How far to look from `sizes`: to the limits that were declared, else twice as far where the graph allows it."""
    if limits is not None:
        return limits if may_be(limits) else sizes
    further = tuple(bucket_end(2 * size) for size in sizes)
    return next((ends for ends in (further, tuple(map(bucket_end, sizes))) if may_be(ends)), sizes)


def sample_points(most: Sizes, may_be: Callable[[Sizes], bool]) -> list[Sizes]:
    """Sizes up to `most`, at which the graph is looked at; each is one that the graph may have."""
    found: dict[Sizes, None] = {}
    for share in SAMPLES:
        point = tuple(max(SMALLEST, round(size * share)) for size in most)
        found |= dict.fromkeys(_near(point, may_be))
    for place in range(len(most) if len(most) > 1 else 0):
        # One size alone, so that what grows with either can be told apart.
        point = tuple(max(SMALLEST, size // 2) if place == number else size for number, size in enumerate(most))
        found |= dict.fromkeys(_near(point, may_be))
    return list(found)


def _near(point: Sizes, may_be: Callable[[Sizes], bool]) -> list[Sizes]:
    """The point itself, or the next multiple of a power of two below it that may be; none where there is none."""
    for step in (1, 2, 4, 8, 16, 32, 64):
        below = tuple(max(SMALLEST, size // step * step) for size in point)
        if may_be(below):
            return [below]
    return []
