"""When each storage of a schedule lives: a problem and a schedule in, buffers with half-open lives out.

Step `i` takes the time from `i` to `i + 1`. A computed value lives from the step that computes it to the end of its
last use; a value that is recomputed is a new buffer each time, because it may lie elsewhere. An output that is written
into an input goes on in the input's buffer. Workspace lives for its step. The load of these buffers is the simulated
peak, less what is resident.
"""

from __future__ import annotations

from dataclasses import replace

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import NO_VALUE, simulate
from remat.layout.problem import Buffer


def lifetimes(problem: Problem, schedule: Schedule, *, block_bytes: int = 1) -> tuple[Buffer, ...]:
    """One buffer for each version of a value and for each workspace; empty ones need no address and are left out.

    An id is the step and the value, as `12:v7`, or the step's workspace, as `12:workspace`. Buffers are whole blocks
    and lie at multiples of them.
    """
    size, workspace = problem.costs.size_bytes, problem.costs.workspace_bytes
    timeline = simulate(problem, schedule)
    buffers: list[Buffer] = []
    newest: dict[int, int] = {}
    for step, (number, ends) in enumerate(zip(schedule.steps, timeline.last_uses, strict=True)):
        taken = timeline.overwritten[step]
        for value, end in zip(problem.graph.ops[number].outputs, ends, strict=True):
            if size[value] > 0 and taken != NO_VALUE:
                newest[value] = newest[taken]
                buffers[newest[value]] = replace(buffers[newest[value]], upper=end + 1)
            elif size[value] > 0:
                amount = _whole(size[value], block_bytes)
                newest[value] = len(buffers)
                buffers.append(Buffer(version_id(step, value), step, end + 1, amount, block_bytes))
        if workspace[number] > 0:
            amount = _whole(workspace[number], block_bytes)
            buffers.append(Buffer(workspace_id(step), step, step + 1, amount, block_bytes))
    return tuple(buffers)


def version_id(step: int, value: int) -> str:
    """What the version of `value` that `step` computes is called."""
    return f"{step}:v{value}"


def workspace_id(step: int) -> str:
    return f"{step}:workspace"


def _whole(size: int, block: int) -> int:
    return -(-size // block) * block
