"""The search for the largest batch that trains, without training: which batch to try next.

In: what was tried, by batch, with its peak or None where it did not fit. Out: the next batch, or None where the answer
is known to within the grain. It doubles, follows the line through the largest peaks where there is one, and halves.
"""

from __future__ import annotations

from collections.abc import Mapping

FARTHEST = 4
"""How many times the largest batch that fits a line may lead."""
Tried = Mapping[int, int | None]


def next_batch(tried: Tried, *, start: int, grain: int, cap_bytes: int) -> int | None:
    """A multiple of the grain, except where halving leads below it."""
    fits, fails = largest_fit(tried), smallest_failure(tried)
    if fits is None:
        if fails is None:
            return start
        return _rounded(fails // 2, grain) or fails // 2 or None if fails > grain else None
    if fails is not None and fails - fits <= grain:
        return None
    led = _led_by_line(tried, cap_bytes)
    farthest = FARTHEST * fits if fails is None else fails
    # Where the line leads to what failed, it is not to be trusted: halve.
    if led is not None and (batch := max(_rounded(led, grain), fits + grain)) < farthest:
        return batch
    return 2 * fits if fails is None else max(_rounded((fits + fails) // 2, grain), fits + 1)


def largest_fit(tried: Tried) -> int | None:
    """Below the smallest that failed: a larger one that fits by chance does not count."""
    failed = smallest_failure(tried)
    found = (batch for batch, peak in tried.items() if peak is not None and (failed is None or batch < failed))
    return max(found, default=None)


def smallest_failure(tried: Tried) -> int | None:
    return min((batch for batch, peak in tried.items() if peak is None), default=None)


def _led_by_line(tried: Tried, cap_bytes: int) -> int | None:
    """Where the line through the two largest batches that fit reaches the cap; None where it leads nowhere.

    Of one batch it goes through zero, which is too steep rather than too flat.
    """
    known = sorted((batch, peak) for batch, peak in tried.items() if peak is not None)[-2:]
    if len(known) == 1:
        known.insert(0, (0, 0))
    (smaller, low), (larger, high) = known
    each = (high - low) / (larger - smaller)
    return int(larger + (cap_bytes - high) / each) if each > 0 else None


def _rounded(batch: int, grain: int) -> int:
    return batch // grain * grain
