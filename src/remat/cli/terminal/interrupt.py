"""Ctrl-C that asks a solver for what it has instead of throwing it away.

The first Ctrl-C moves the clock of a solver's limits past every deadline, so that it stops as at its time limit and
returns its best schedule; the second ends the command. Strategies, which have little to return before their end, take
no part: the first Ctrl-C ends them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from remat.core.search.limits import Limits

AnySolver = TypeVar("AnySolver")
_FOREVER_S = 1e9


@dataclass(frozen=True, slots=True)
class OnClock:
    """A solver of schedules or of layouts, whose limits run on another clock."""

    inner: Any
    clock: Callable[[], float]

    @property
    def name(self) -> str:
        return str(self.inner.name)

    def solve(self, problem: Any, limits: Limits, progress: Any = None) -> Any:
        return self.inner.solve(problem, replace(limits, clock=self.clock), progress)


class Interrupt:
    """Was Ctrl-C pressed? And the clock that knows."""

    def __init__(self) -> None:
        self.asked = False
        self._heeded = False

    def clock(self) -> float:
        return time.monotonic() + (_FOREVER_S if self.asked else 0.0)

    def heeded_by(self, solver: AnySolver) -> AnySolver:
        """The same solver on this clock; a strategy is returned as it is."""
        # Imported here because commands start faster without the solvers.
        from remat.solvers.base import Strategy

        if isinstance(solver, Strategy):
            return solver
        self._heeded = True
        return cast(AnySolver, OnClock(solver, self.clock))

    @contextmanager
    def caught(self, tell: Callable[[str], None]) -> Iterator[None]:
        """While this lasts, the first Ctrl-C is noted and told if a solver heeds it; the next one is Python's own."""
        if not self._heeded:
            yield
            return
        before = signal.getsignal(signal.SIGINT)

        def note(*_: object) -> None:
            self.asked = True
            signal.signal(signal.SIGINT, before)
            tell("Stopping with the best schedule so far; press Ctrl-C again to give up.")

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
