"""The optimum of a small problem with copies by definition: a shortest path over all that can be the case.

Shares nothing with the solvers. Beside running an op, a step may begin a copy out, begin a copy back, or drop a value,
for which it waits while the value is being copied. Times are whole numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

from remat.core import Problem
from remat.core.copies import Movable, movable_of, without_copies


@dataclass(frozen=True, order=True)
class State:
    """Times are counted from now on."""

    stage: int
    memory: tuple[tuple[int, int], ...]
    """Values in memory, and how long until each has arrived."""
    host: tuple[tuple[int, int], ...]
    """Values on the host, and how long until each is there."""
    out_free: int
    back_free: int

    def later(self, by: int) -> State:
        def moved(items: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
            return tuple((value, max(0, left - by)) for value, left in items)

        out, back = max(0, self.out_free - by), max(0, self.back_free - by)
        return State(self.stage, moved(self.memory), moved(self.host), out, back)


def best_time_with_copies(problem: Problem) -> int | None:
    """The least time of a schedule within the budget; None where there is none."""
    movable = {int(item.value): item for item in movable_of(problem)}
    problem = without_copies(problem)
    queue: list[tuple[int, State]] = [(0, State(0, (), (), 0, 0))]
    seen: set[State] = set()
    while queue:
        time, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        there = {value for value, left in state.memory if not left}
        if state.stage == len(problem.graph.ops) and set(problem.graph.outputs) <= there:
            return time
        for taken, following in _following(problem, movable, state):
            if following not in seen:
                heapq.heappush(queue, (time + taken, following))
    return None


def _following(problem: Problem, movable: dict[int, Movable], state: State) -> Iterator[tuple[int, State]]:
    yield from _runs(problem, state)
    sizes, memory, host = problem.costs.size_bytes, dict(state.memory), dict(state.host)
    for value, left in memory.items():
        rest = tuple(item for item in state.memory if item[0] != value)
        # What is under way to the host, or back from it, cannot be dropped before.
        wait = max(left, host.get(value, 0))
        yield wait, replace(state, memory=rest).later(wait)
        if value not in host and not left and value in movable:
            done = state.out_free + int(movable[value].out_ns)
            yield 0, replace(state, host=tuple(sorted({**host, value: done}.items())), out_free=done)
    live = problem.resident_bytes + sum(sizes[value] for value in memory)
    for value, left in host.items():
        if value not in memory and not left and live + sizes[value] <= problem.budget_bytes:
            done = state.back_free + int(movable[value].back_ns)
            yield 0, replace(state, memory=tuple(sorted({**memory, value: done}.items())), back_free=done)


def _runs(problem: Problem, state: State) -> Iterator[tuple[int, State]]:
    memory, sizes = dict(state.memory), problem.costs.size_bytes
    for number, op in enumerate(problem.graph.ops[: state.stage + 1]):
        again = number < state.stage
        if not set(op.inputs) <= set(memory) or (again and not op.recomputable):
            continue
        # Whoever computes what is there, or on its way, wastes time.
        if again and set(op.outputs) <= set(memory):
            continue
        wait = max((memory[value] for value in op.inputs), default=0)
        ready = state.later(wait)
        after = {**dict(ready.memory), **dict.fromkeys(op.outputs, 0)}
        live = problem.resident_bytes + sum(sizes[value] for value in after)
        if live + problem.costs.workspace_bytes[number] <= problem.budget_bytes:
            taken = int(problem.costs.time_ns[number])
            ran = replace(ready, memory=tuple(sorted(after.items())), stage=state.stage + (not again))
            yield wait + taken, ran.later(taken)
