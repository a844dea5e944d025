"""The peak of a step whose backward keeps its graph (`retain_graph=True`).

In: a problem, a schedule, and the op at which forward ends. What crosses from forward to backward is then not freed by
its last reader and not written over: it stays until a later backward, which adds gradients to those of the first.
"""

from __future__ import annotations

from itertools import accumulate

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate


def peak_with_kept_graph(problem: Problem, schedule: Schedule, turn: OpId, times: int) -> int:
    """The most in memory where `times` backwards keep the graph, and one more follows.

    `turn` stands between forward and backward.
    """
    timeline = simulate(problem, schedule)
    ops, size = problem.graph.ops, problem.costs.size_bytes
    middle = schedule.steps.index(turn)
    stays = [0] * (len(schedule.steps) + 1)
    for place, number in enumerate(schedule.steps[:middle]):
        for value, end in zip(ops[number].outputs, timeline.last_uses[place], strict=True):
            if end > middle:
                is_written_over = end < len(timeline.overwritten) and timeline.overwritten[end] == value
                stays[min(end + (not is_written_over), len(schedule.steps))] += size[value]
    total = [live + kept for live, kept in zip(timeline.live_bytes, accumulate(stays), strict=False)]
    gradients = sum(size[value] for op in ops if op.backward for value in op.outputs if value in problem.graph.outputs)
    # The last backward frees what it reads, as the only one does.
    later = total if times > 1 else timeline.live_bytes
    return max(*total, max(later[middle:]) + gradients)
