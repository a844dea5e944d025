"""A backward in two parts: what it computes again before it reads an incoming gradient, and the rest.

In: a lowered schedule. Out: `EarlyBackward`, whose first part turns what forward saved into what the rest needs. Both
together run every step in its order, so they need as much memory as the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.pytorch.graph.capture import Captured
from remat.pytorch.run.lower import Lowered, lower_backward


@dataclass(frozen=True, slots=True)
class EarlyBackward:
    begin: Callable[[list[Any]], tuple[Any, ...]]
    """Takes what forward saved, and empties it."""
    rest: Lowered
    """Its backward takes what `begin` returns, and the incoming gradients."""


def early_steps(captured: Captured, schedule: Schedule) -> int:
    """How many steps after the boundary need no incoming gradient."""
    start = schedule.steps.index(captured.boundary) + 1
    ops, incoming = captured.graph.ops, set(captured.graph.ops[captured.boundary].outputs)
    count = 0
    for number in schedule.steps[start:]:
        if number > captured.boundary or incoming & set(ops[number].inputs):
            break
        count += 1
    return count


def early_backward(captured: Captured, lowered: Lowered, joined: frozenset[OpId] = frozenset()) -> EarlyBackward | None:
    """None where backward begins with gradients."""
    count = early_steps(captured, lowered.schedule)
    if not count:
        return None
    first, rest = lower_backward(captured, lowered.schedule, count, joined=joined)
    return EarlyBackward(first.forward, Lowered(lowered.schedule, lowered.forward_module, rest, lambda: rest))


def computed_early(problem: Problem, schedule: Schedule, captured: Captured, limit_bytes: int) -> Schedule:
    """The same schedule with recomputations moved before the first use of an incoming gradient, while backward fits."""
    boundary = schedule.steps.index(captured.boundary)
    count = early_steps(captured, schedule)
    for place in range(boundary + 1 + count, len(schedule.steps)):
        if schedule.steps[place] > captured.boundary or not _can_move(problem, schedule, place, boundary + 1 + count):
            continue
        moved = list(schedule.steps)
        moved.insert(boundary + 1 + count, moved.pop(place))
        tried = Schedule(tuple(moved))
        if max(simulate(problem, tried).live_bytes[boundary:]) <= limit_bytes:
            schedule, count = tried, count + 1
    return schedule


def _can_move(problem: Problem, schedule: Schedule, place: int, target: int) -> bool:
    """Whether nothing between the two places makes what the step reads, or makes or reads what it makes."""
    op = problem.graph.ops[schedule.steps[place]]
    between = [problem.graph.ops[number] for number in schedule.steps[target:place]]
    made = {value for other in between for value in other.outputs}
    read = {value for other in between for value in other.inputs}
    return not made & {*op.inputs, *op.outputs} and not read & set(op.outputs)
