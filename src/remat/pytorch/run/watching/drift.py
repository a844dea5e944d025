"""Planned steps as they go on: what each takes against its plan, for less than half a percent of its time.

In: when a step begins and ends, and under which plan. Out: whether steps have become slower or faster than they were
when their plan was new, and whether others leave less memory than the plan needs, or more than it was given. Looking is
left out wherever it has taken more than its share.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.pytorch.device import room_bytes

MOST_SHARE = 0.005
"""Of a step's time, for looking at it."""
FIRST, LATEST = 8, 16
"""Steps of a plan that say what is usual, and that say what is now."""
DRIFT = 1.25
"""A step that takes this many times as long as usual, or is this many times as fast, is another one."""
MOST_AGAIN = 3
"""How often ops are measured again; where that does not help, nothing will."""
MARGIN = 0.02
"""Of the room that others leave, not to be planned with: the allocator's pieces do not always fit."""


@dataclass(slots=True)
class Gate:
    """Keeps looking within its share of the time that passes."""

    share: float = MOST_SHARE
    spent_ns: int = 0
    passed_ns: int = 0
    _last_ns: int = 0

    def is_due(self) -> bool:
        """Asked once for each step."""
        now = time.perf_counter_ns()
        self.passed_ns += now - self._last_ns if self._last_ns else 0
        self._last_ns = now
        return self.spent_ns <= self.share * self.passed_ns


class StepTimer:
    """From here to `stop`, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        self._start_ns, self._stop_ns = time.perf_counter_ns(), 0
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        self._stop_ns = time.perf_counter_ns()
        if self._events:
            self._events[1].record()

    @property
    def is_stopped(self) -> bool:
        return self._stop_ns > 0

    def time_ns(self) -> float | None:
        """None where it was never stopped, or the device is not there yet."""
        if not self._stop_ns or (self._events and not self._events[1].query()):
            return None
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) * 1e6
        return float(self._stop_ns - self._start_ns)


@dataclass(slots=True)
class TimesTaken:
    """What steps took under one plan."""

    usual: list[float] = field(default_factory=list)
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    def add(self, time_ns: float) -> None:
        if len(self.usual) < FIRST:
            self.usual.append(time_ns)
        else:
            self.latest.append(time_ns)

    def drift(self) -> float:
        """How many times as long as usual steps take now; 1 until that is known."""
        if len(self.latest) < LATEST:
            return 1.0
        return statistics.median(self.latest) / max(1.0, statistics.median(self.usual))


@dataclass(slots=True)
class DriftWatch:
    """Looks at every step of a session that it has time for."""

    gate: Gate = field(default_factory=Gate)
    records: dict[object, TimesTaken] = field(default_factory=dict)
    left_bytes: int | None = None
    """What others leave, where that is less than the budget."""
    _timer: StepTimer | None = None
    _plan: object = None
    _again: int = 0

    def begin_step(self, device: torch.device, plan: object, needed_bytes: int, budget_bytes: int) -> bool:
        """A step begins under a plan; whether others have taken memory that it needs, or left some that was taken."""
        self._note()
        if not self.gate.is_due() or plan is None:
            return False
        start = time.perf_counter_ns()
        is_other = self._look_at_room(device, needed_bytes, budget_bytes)
        # Others have their share of a CPU: how long steps take there says little of their ops.
        self._timer, self._plan = StepTimer(device) if device.type != "cpu" else None, plan
        self.gate.spent_ns += time.perf_counter_ns() - start
        return is_other

    def end_step(self) -> None:
        """The last backward of the step is over."""
        if self._timer is not None:
            start = time.perf_counter_ns()
            self._timer.stop()
            self.gate.spent_ns += time.perf_counter_ns() - start

    def forget(self) -> None:
        """Plans are made anew."""
        self.records.clear()
        self._timer = None

    def drifted(self, plan: object) -> float:
        """By which factor steps of a plan have changed, where that calls for another; 1 where it does not."""
        record = self.records.get(plan)
        factor = record.drift() if record is not None and self._again < MOST_AGAIN else 1.0
        if 1 / DRIFT <= factor <= DRIFT:
            return 1.0
        self._again += 1
        return factor

    def _note(self) -> None:
        timer, self._timer = self._timer, None
        found = timer.time_ns() if timer is not None else None
        if found is not None:
            self.records.setdefault(self._plan, TimesTaken()).add(found)

    def _look_at_room(self, device: torch.device, needed_bytes: int, budget_bytes: int) -> bool:
        room = room_bytes(device)
        if room is None:
            return False
        room = int(room * (1 - MARGIN))
        before = self.left_bytes
        if room < needed_bytes:
            self.left_bytes = room
        elif before is not None and (room >= budget_bytes or room > DRIFT * before):
            # What others gave back is spent again.
            self.left_bytes = None if room >= budget_bytes else room
        return self.left_bytes != before
