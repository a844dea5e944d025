"""The best answer of a search so far, what is proven about the best there can be, and whether to go on.

In: `Limits`, then answers with their values, of which less is better, and bounds that no answer goes below. Out: the
best of each. Solvers of schedules and of layouts say what an answer is to them and when nothing is left to find.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from remat.core.search.limits import Countdown, Limits

Found = TypeVar("Found")
Value = TypeVar("Value", int, float)


class Incumbent(ABC, Generic[Found, Value]):
    def __init__(self, limits: Limits, best: Found, value: Value, bound: Value) -> None:
        self.limits, self.countdown = limits, Countdown(limits)
        self.best = best
        self.value: Value = value
        self.bound: Value = bound

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Is nothing left to find?"""

    @abstractmethod
    def tell(self, source: str) -> None:
        """Report the value and the bound after `source` has changed one of them."""

    def left_s(self) -> float:
        return self.countdown.left_s()

    def stop(self) -> bool:
        """Is the time up, or nothing left to find?"""
        return self.left_s() <= 0 or self.is_closed

    def keep(self, found: Found, value: Value, source: str) -> bool:
        """Keep an answer that is better than everything before; says whether it is."""
        if value >= self.value:
            return False
        self.best, self.value = found, value
        self.tell(source)
        return True

    def raise_bound(self, bound: Value, source: str) -> None:
        """No answer has a value below `bound`."""
        if bound > self.bound:
            self.bound = bound
            self.tell(source)
