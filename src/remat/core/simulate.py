"""Memory over time of a schedule, and its time: two linear passes, one backwards for the last uses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from remat.core.engines import follow_copies
from remat.core.graph import Graph
from remat.core.problem import Problem
from remat.core.schedule import Schedule

NO_VALUE = -1


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happens when a schedule runs."""

    live_bytes: tuple[int, ...]
    """Bytes in memory while each step runs: resident, live versions, the step's outputs and its workspace."""
    last_uses: tuple[tuple[int, ...], ...]
    """For each step, until which step each of its outputs lives, that step included."""
    overwritten: tuple[int, ...]
    """For each step, the input into whose storage it writes its output, or `NO_VALUE`."""
    peak_bytes: int
    peak_step: int
    time_ns: float


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Follow `schedule` step by step. It must be valid: see `validate`."""
    steps, ops = schedule.steps, problem.graph.ops
    size, workspace = problem.costs.size_bytes, problem.costs.workspace_bytes
    last_uses = _last_uses(problem.graph, schedule)
    change = [0] * (len(steps) + 1)
    for step, (number, ends) in enumerate(zip(steps, last_uses, strict=True)):
        for value, end in zip(ops[number].outputs, ends, strict=True):
            change[step] += size[value]
            change[end + 1] -= size[value]
    overwritten = _overwritten(problem.graph, schedule, last_uses)
    change[0] += problem.resident_bytes
    live = [
        held + workspace[number] - (size[into] if into != NO_VALUE else 0)
        for held, number, into in zip(accumulate(change[:-1]), steps, overwritten, strict=True)
    ]
    peak = max(live, default=problem.resident_bytes)
    time = problem.costs.time_ns
    return Timeline(
        live_bytes=tuple(live),
        last_uses=tuple(last_uses),
        overwritten=tuple(overwritten),
        peak_bytes=peak,
        peak_step=live.index(peak) if live else -1,
        time_ns=follow_copies(problem, schedule).time_ns if problem.costs.copy_ns else sum(time[op] for op in steps),
    )


def overwritten_inputs(graph: Graph, schedule: Schedule) -> list[int]:
    """For each step, the input into whose storage it writes its output, or `NO_VALUE`."""
    return _overwritten(graph, schedule, _last_uses(graph, schedule))


def _last_uses(graph: Graph, schedule: Schedule) -> list[tuple[int, ...]]:
    steps, ops = schedule.steps, graph.ops
    end = len(steps) - 1
    # Going backwards, the first use met is the last use of the version computed before it.
    last: list[int] = [-1] * graph.value_count
    for value in graph.outputs:
        last[value] = end
    result: list[tuple[int, ...]] = [()] * len(steps)
    for step in range(end, -1, -1):
        op = ops[steps[step]]
        # Searches simulate long schedules again and again, and most ops have one output.
        if len(op.outputs) == 1:
            value = op.outputs[0]
            result[step] = (last[value] if last[value] >= 0 else step,)
            last[value] = -1
        else:
            result[step] = tuple([last[value] if last[value] >= 0 else step for value in op.outputs])
            for value in op.outputs:
                last[value] = -1
        for value in op.inputs:
            if last[value] < 0:
                last[value] = step
    return result


def _overwritten(graph: Graph, schedule: Schedule, last_uses: list[tuple[int, ...]]) -> list[int]:
    # Going forwards, this is until when the newest version of each value lives.
    ends = [-1] * graph.value_count
    result = [NO_VALUE] * len(schedule.steps)
    if not any(op.overwrites for op in graph.ops):
        return result
    for step, number in enumerate(schedule.steps):
        op = graph.ops[number]
        for value in op.overwrites:
            if ends[value] == step:
                result[step] = value
                break
        for value, end in zip(op.outputs, last_uses[step], strict=True):
            ends[value] = end
    return result
