"""When a search has to end, wherever it is.

In: seconds, around a solve. Out: `OutOfTime` from the loops of that solve which may take long. Searches look at their
own clocks between schedules; on a graph of a hundred thousand ops a single schedule can take minutes. The pieces that
make schedules are shared by twenty strategies and know nothing of limits, so that the deadline is not handed to each of
them but stands where all of them can see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[tuple[float, Callable[[], float]] | None] = ContextVar("deadline", default=None)


class OutOfTime(Exception):
    """What was being made is not finished; what was finished before still counts."""


@contextmanager
def within(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Whatever calls `check_time` in here more than `seconds` from now is ended; a closer limit around it stays."""
    outer, until = _current.get(), clock() + seconds
    if outer is not None and outer[0] - outer[1]() < seconds:
        yield
        return
    token = _current.set((until, clock))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def unhurried() -> Iterator[None]:
    """What runs in here ends by itself, whatever limits stand around it: its work is known ahead."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def check_time() -> None:
    """Raise `OutOfTime` where time is up."""
    current = _current.get()
    if current is not None and current[1]() > current[0]:
        raise OutOfTime
