"""The time of a schedule whose copies run beside its ops.

Three engines work side by side: one computes, one copies to the host, one copies back, each in order. A copy out begins
when its op is reached, and `GONE` waits for its end. A copy back begins when its op is reached, and whoever reads it
first waits for its arrival. Memory follows from the schedule's order alone: a link that is slower than thought makes a
step slower, and no larger.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.graph import Op, Transfer
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
class Engines:
    """What happens beside and between the ops."""

    time_ns: float
    """Of the whole step."""
    waited_ns: float
    """How long the ops waited for copies."""
    copies: tuple[CopyRun, ...]
    host_peak_bytes: int


def follow_copies(problem: Problem, schedule: Schedule) -> Engines:
    """Follow `schedule` step by step. It must be valid: see `validate`."""
    ops, costs = problem.graph.ops, problem.costs
    now = waited = 0.0
    free = {Transfer.OUT: 0.0, Transfer.BACK: 0.0}
    done: dict[int, float] = {}
    runs: list[CopyRun] = []
    for step, number in enumerate(schedule.steps):
        op = ops[number]
        ready = max((done.get(value, 0.0) for value in _awaited(op)), default=0.0)
        waited += max(0.0, ready - now)
        now = max(now, ready) + costs.time_ns[number]
        if op.transfer in free:
            start = max(now, free[op.transfer])
            free[op.transfer] = done[op.outputs[0]] = start + costs.copy_ns[number]
            runs.append(CopyRun(step, start, free[op.transfer]))
        else:
            # An op that computes a value again has no copy to wait for.
            for value in op.outputs:
                done.pop(value, None)
    return Engines(now, waited, tuple(runs), _host_peak(problem, schedule))


def _awaited(op: Op) -> tuple[int, ...]:
    """Values whose copies have to be there before `op` can run; a copy does not wait for others but by its engine."""
    return () if op.transfer in (Transfer.OUT, Transfer.BACK) else op.inputs


def _host_peak(problem: Problem, schedule: Schedule) -> int:
    """A copy is on the host from its beginning until what came back of it last is read."""
    ops, size = problem.graph.ops, problem.costs.size_bytes
    last = _last_reads(problem, schedule)
    current = peak = 0
    leaving: dict[int, int] = {}
    for step, number in enumerate(schedule.steps):
        op = ops[number]
        if op.transfer is Transfer.OUT:
            current += size[op.inputs[0]]
            end = last.get(op.outputs[0], step)
            leaving[end] = leaving.get(end, 0) + size[op.inputs[0]]
        peak = max(peak, current)
        current -= leaving.pop(step, 0)
    return peak


def _last_reads(problem: Problem, schedule: Schedule) -> dict[int, int]:
    """For each copy under way, the step that first reads what came back of it last; that of `GONE` where none did."""
    copy_of: dict[int, int] = {}
    waits: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, number in enumerate(schedule.steps):
        op = problem.graph.ops[number]
        if op.transfer is Transfer.GONE:
            under_way = op.inputs[1]
            copy_of[op.outputs[0]] = under_way
            last[under_way] = step
        elif op.transfer is Transfer.BACK:
            waits[op.outputs[0]] = copy_of[op.inputs[0]]
            last[copy_of[op.inputs[0]]] = step
        for value in op.inputs:
            if value in waits:
                last[waits.pop(value)] = step
    return last
