"""What steps of a plan take on the device, seen from outside.

In: when a step begins, when the engine comes to its backward and when it returns. Out: the usual time from a step's
first kernel to its last. Kernels take longer within a step than alone, as a GPU at its power limit lowers its clock, so
only steps tell what steps take. Two events mark a step and nobody waits for them: they are read once the device has
passed them. The first steps are all timed; later ones as long as that takes a thousandth of what passes, since what
else uses the device comes and goes.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from remat.pytorch._compat.engine import unwatch_engine, watch_engine
from remat.pytorch.run.watching.drift import Gate, StepTimer

LATEST = 9
"""Steps that say what is usual: the first after planning find a device that is colder than it will be."""
TIMED_STEPS = 16
"""After a plan was made, however short they are."""
LATER_SHARE = 1e-3
"""Of the time that passes, for timing later ones."""
BOTH_ENDS = 2
"""Ending to time a step takes the host about as long as beginning."""


@dataclass(slots=True, eq=False)
class StepClock:
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))
    _left: int = 0
    _timer: StepTimer | None = None
    """Of the step under way."""
    _waiting: deque[StepTimer] = field(default_factory=deque)
    """Steps that are over, which the device may not have come to yet."""
    _gate: Gate | None = None
    """Of later steps; there is none before a plan was made."""
    _goes_back: bool = False
    """Whether the backward under way is one of the step's."""

    def after_planning(self) -> None:
        self._stop()
        self._waiting.clear()
        self._latest.clear()
        self._left = TIMED_STEPS
        self._gate = Gate(LATER_SHARE)

    def begin_step(self, device: torch.device) -> None:
        """Time the step that begins, if it is one of the first or that costs next to nothing."""
        self._stop()
        if self._gate is None or not tells_time(device):
            return
        began = time.perf_counter_ns()
        if self._gate.is_due() or self._left:
            self._left = max(0, self._left - 1)
            self._read()
            self._timer = StepTimer(device)
            watch_engine(self)
            self._gate.spent_ns += BOTH_ENDS * (time.perf_counter_ns() - began)

    @property
    def is_watching(self) -> bool:
        return self._timer is not None

    def engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        """Whose backward it is, `goes_back` tells."""
        self._goes_back = False

    def goes_back(self) -> None:
        """The engine has come to the step's own graph."""
        self._goes_back = True

    def engine_returned(self) -> None:
        if self._timer is not None and self._goes_back:
            # A step of several graphs goes back several times: the last time counts.
            self._timer.stop()

    def usual_ns(self) -> float:
        """Of the latest steps that the device is done with; 0 where none is."""
        self._read()
        return statistics.median(self._latest) if self._latest else 0.0

    def _read(self) -> None:
        while self._waiting and (taken := self._waiting[0].time_ns()) is not None:
            self._latest.append(taken)
            self._waiting.popleft()

    def _stop(self) -> None:
        """The step is over, unless it never went back, as one that was only evaluated."""
        timer, self._timer = self._timer, None
        if timer is not None:
            unwatch_engine(self)
            if timer.is_stopped:
                self._waiting.append(timer)


def tells_time(device: torch.device) -> bool:
    """A CPU is shared: how long a step takes there says little of it."""
    return device.type == "cuda"
