"""The most generous of many settings whose schedule still fits.

In: settings in order, from those that need the least memory to those that need the most, and how to make a schedule
from one. Out: schedules, tried on a coarse grid first and then with ever smaller steps around the last setting that
fits, or around the one with the smallest peak while none does. Memory need not grow at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate

GRID_POINTS = 8

Setting = TypeVar("Setting")


def climb(
    problem: Problem, settings: Sequence[Setting], make: Callable[[Setting], Schedule], grid: int = GRID_POINTS
) -> Iterator[Schedule]:
    """Schedules on the way; the most generous is tried first, so that nothing else is made where that fits."""
    peaks: dict[int, int] = {}
    last, step = len(settings) - 1, -(-len(settings) // grid)
    places = [last, *range(0, last, step or 1)] if settings else []
    while places:
        for place in places:
            schedule = make(settings[place])
            peaks[place] = simulate(problem, schedule).peak_bytes
            yield schedule
            if peaks[last] <= problem.budget_bytes:
                return
        if step <= 1:
            return
        step = -(-step // 2)
        fitting = [place for place, peak in peaks.items() if peak <= problem.budget_bytes]
        centre = max(fitting) if fitting else min(peaks, key=peaks.__getitem__)
        places = [place for place in (centre - step, centre + step) if 0 <= place <= last and place not in peaks]
        if not places and step > 1:
            places = [place for place in (centre - 1, centre + 1) if 0 <= place <= last and place not in peaks]
