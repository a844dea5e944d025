"""Ctrl-C that asks a solver for what it has instead of throwing it away.

The first Ctrl-C moves the solver's clock past every deadline, so that it stops as at its time limit and returns its
best schedule; the second ends the command. A solver takes part by having a `clock` among its options.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

AnySolver = TypeVar("AnySolver")
_FOREVER_S = 1e9


class Interrupt:
    """Was Ctrl-C pressed? And the clock that knows."""

    def __init__(self) -> None:
        self.asked = False
        self._heeded = False

    def clock(self) -> float:
        return time.monotonic() + (_FOREVER_S if self.asked else 0.0)

    def heeded_by(self, solver: AnySolver) -> AnySolver:
        """The same solver on this clock; one without a clock is returned as it is."""
        options: Any = solver
        if not is_dataclass(solver) or all(field.name != "clock" for field in fields(solver)):
            return solver
        self._heeded = True
        changed: AnySolver = replace(options, clock=self.clock)
        return changed

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
