"""The time of a schedule whose copies run beside its ops.

Three engines work side by side: one computes, one copies to the host, one copies back, each in order. A copy out begins
when its op is reached, and `GONE` waits for its end. A copy back begins when its op is reached, and whoever reads it
first waits for its arrival. Memory follows from the schedule's order alone: a link that is slower than thought makes a
step slower, and no larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from remat.core.graph import Transfer
from remat.core.problem import Problem
from remat.core.schedule import Schedule


@dataclass(frozen=True, slots=True)
class CopyRun:
    """One copy as it happens."""

    step: int
    """Which of the schedule begins it."""
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """What happens beside and between the ops."""

    time_ns: float
    """Of the whole step."""
    waits_ns: tuple[float, ...]
    """How long each step waited for copies."""
    copies: tuple[CopyRun, ...]
    host_peak_bytes: int

    @property
    def waited_ns(self) -> float:
        return sum(self.waits_ns)


def follow_copies(problem: Problem, schedule: Schedule) -> CopyTimes:
    """Follow `schedule` step by step. It must be valid: see `validate`."""
    ops, costs = problem.graph.ops, problem.costs
    now, waits = 0.0, list[float]()
    free = {Transfer.OUT: 0.0, Transfer.BACK: 0.0}
    done: dict[int, float] = {}
    runs: list[CopyRun] = []
    for step, number in enumerate(schedule.steps):
        op = ops[number]
        ready = max((done.get(value, 0.0) for value in op.inputs), default=0.0)
        waits.append(max(0.0, ready - now))
        now = max(now, ready) + costs.time_ns[number]
        if op.transfer in free:
            start = max(now, free[op.transfer])
            free[op.transfer] = done[op.outputs[0]] = start + costs.copy_ns[number]
            runs.append(CopyRun(step, start, free[op.transfer]))
        else:
            # An op that computes a value again has no copy to wait for.
            for value in op.outputs:
                done.pop(value, None)
    return CopyTimes(now, tuple(waits), tuple(runs), _host_peak(problem, schedule))


def _host_peak(problem: Problem, schedule: Schedule) -> int:
    """A copy is on the host from its beginning until what came back of it last is read."""
    ops, size = problem.graph.ops, problem.costs.size_bytes
    ends = _last_needs(problem, schedule)
    change = [0] * (len(schedule.steps) + 1)
    for start, end in ends.items():
        amount = size[ops[schedule.steps[start]].inputs[0]]
        change[start] += amount
        change[end + 1] -= amount
    return max(accumulate(change))


def _last_needs(problem: Problem, schedule: Schedule) -> dict[int, int]:
    """For each step that begins a copy out, the last step that needs the copy."""
    copy_of: dict[int, int] = {}  # of marks and of values that came back and were not read yet
    ends: dict[int, int] = {}
    for step, number in enumerate(schedule.steps):
        op = problem.graph.ops[number]
        for value in op.inputs:
            if value in copy_of:
                ends[copy_of[value]] = step
        if op.transfer is Transfer.OUT:
            copy_of.pop(op.inputs[0], None)
            copy_of[op.outputs[0]] = step
            ends[step] = step
        elif op.transfer is not None:
            copy_of[op.outputs[0]] = copy_of[op.inputs[-1]]
            if op.transfer is Transfer.GONE:
                copy_of.pop(op.inputs[0], None)
        else:
            for value in (*op.inputs, *op.outputs):
                copy_of.pop(value, None)
    return ends
