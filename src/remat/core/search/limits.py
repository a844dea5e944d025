"""How long a solver may look, how good is good enough, and what its random choices are drawn from.

In: `Limits`, frozen, handed unchanged through solvers of schedules and of layouts alike. Out: a `Countdown`, which says
how much of the time is left since it was made. Clocks are arguments, so that tests can turn them; an interrupt is a
clock that jumps past every deadline, whereupon a solver stops as it does at its time limit and returns its best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    time_limit_s: float
    gap: float = 1e-3
    """Enough is an answer that is proven to be within this share of the best one."""
    seed: int = 0
    clock: Callable[[], float] = time.monotonic

    def within(self, time_limit_s: float) -> Limits:
        """The same for another time."""
        return replace(self, time_limit_s=time_limit_s)


class Countdown:
    """The time of some limits, which runs from now on."""

    def __init__(self, limits: Limits) -> None:
        self._clock, self._start = limits.clock, limits.clock()
        self._end = self._start + limits.time_limit_s

    def elapsed_s(self) -> float:
        return self._clock() - self._start

    def left_s(self) -> float:
        return max(0.0, self._end - self._clock())

    def is_over_by(self, grace_s: float) -> bool:
        """Has the time been over for longer than `grace_s`?"""
        return self._clock() > self._end + grace_s
