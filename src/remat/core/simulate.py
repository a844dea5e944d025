"""Memory over time of a schedule, and its time: two linear passes, one backwards for the last uses."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.problem import Problem
from remat.core.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happens when a schedule runs."""

    live_bytes: tuple[int, ...]
    """Bytes in memory while each step runs: resident, live versions, the step's outputs and its workspace."""
    last_uses: tuple[tuple[int, ...], ...]
    """For each step, until which step each of its outputs lives, that step included."""
    peak_bytes: int
    peak_step: int
    time_ns: float


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Follow `schedule` step by step. It must be valid: see `validate`."""
    steps, ops = schedule.steps, problem.graph.ops
    size, workspace = problem.costs.size_bytes, problem.costs.workspace_bytes
    last_uses = _last_uses(problem, schedule)
    change = [0] * (len(steps) + 1)
    for step, (number, ends) in enumerate(zip(steps, last_uses, strict=True)):
        for value, end in zip(ops[number].outputs, ends, strict=True):
            change[step] += size[value]
            change[end + 1] -= size[value]
    live: list[int] = []
    current = problem.resident_bytes
    for step, number in enumerate(steps):
        current += change[step]
        live.append(current + workspace[number])
    peak = max(live, default=problem.resident_bytes)
    time = problem.costs.time_ns
    return Timeline(
        live_bytes=tuple(live),
        last_uses=tuple(last_uses),
        peak_bytes=peak,
        peak_step=live.index(peak) if live else -1,
        time_ns=sum(time[number] for number in steps),
    )


def _last_uses(problem: Problem, schedule: Schedule) -> list[tuple[int, ...]]:
    steps, ops = schedule.steps, problem.graph.ops
    end = len(steps) - 1
    # Going backwards, the first use met is the last use of the version computed before it.
    last: list[int] = [-1] * problem.graph.value_count
    for value in problem.graph.outputs:
        last[value] = end
    result: list[tuple[int, ...]] = [()] * len(steps)
    for step in range(end, -1, -1):
        op = ops[steps[step]]
        result[step] = tuple(last[value] if last[value] >= 0 else step for value in op.outputs)
        for value in op.outputs:
            last[value] = -1
        for value in op.inputs:
            if last[value] < 0:
                last[value] = step
    return result
