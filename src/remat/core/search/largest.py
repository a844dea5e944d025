"""The largest size that fits, found with few looks.

In: a test, a guess and a grid. Out: the largest multiple of the grid that passes, taking it that all smaller ones do.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.errors import RematError

MOST_STEPS = 1 << 30


def largest(fits: Callable[[int], bool], guess: int, grid: int) -> int:
    """The largest multiple of `grid` that fits, taking it that all smaller ones do; 0 where none does.

    Looks at `guess` and its neighbour, then ever further away, then between: a good guess is settled in two looks.
    """
    low, high = _bracket(lambda step: fits(step * grid), max(1, guess // grid))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * grid) else (low, middle)
    return low * grid


def _bracket(fits: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """A step that fits, or 0, and one that does not."""
    probe, stride = guess, 1
    if fits(guess):
        while True:
            low, probe, stride = probe, probe + stride, 2 * stride
            if probe > MOST_STEPS:
                raise RematError(f"Even {low} steps fit: memory does not grow along this axis; choose another one.")
            if not fits(probe):
                return low, probe
    while probe > 1:
        high, probe, stride = probe, max(1, probe - stride), 2 * stride
        if fits(probe):
            return probe, high
    return 0, 1
