"""The optimum of a small problem: the shortest path over (next first run, what is in memory).

In: a problem and the extra time to beat. Out: the best schedule, or a proof that there is none. Runs may come in any
order and number, so this also finds the rare schedules that an `EditableSchedule` cannot hold: those which, before one
first run, run an op twice or out of the graph's order. An op that may overwrite an input does so or not. Moves are
counted, so larger problems are given up, not waited for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import check_time

MAX_MOVES = 200_000
MAX_VALUES = 64

State = tuple[int, int]
"""The next op to run for the first time, and the values in memory as bits."""


@dataclass(frozen=True, slots=True)
class Shortest:
    """`schedule` is None where nothing beats the limit; `complete` says that this is proven."""

    schedule: Schedule | None
    complete: bool


def shortest_schedule(problem: Problem, limit: float, max_moves: int = MAX_MOVES) -> Shortest:
    """The fastest schedule within the budget whose extra time is below `limit`."""
    if problem.graph.value_count > MAX_VALUES:
        return Shortest(None, complete=False)
    moves = _Moves(problem)
    best: dict[State, float] = {(0, 0): 0.0}
    came_from: dict[State, tuple[State, int]] = {}
    done: set[State] = set()
    moved = 0
    queue: list[tuple[float, int, State]] = [(0.0, 0, (0, 0))]
    while queue:
        extra, _, state = heapq.heappop(queue)
        if state in done:
            continue
        if moved >= max_moves:
            return Shortest(None, complete=False)
        check_time()
        done.add(state)
        if moves.is_end(state):
            return Shortest(_trace(state, came_from), complete=True)
        for following, number, time in moves.after(state):
            moved += 1
            if extra + time < min(limit, best.get(following, limit)):
                best[following], came_from[following] = extra + time, (state, number)
                heapq.heappush(queue, (extra + time, -following[0], following))
    return Shortest(None, complete=True)


class _Moves:
    """What can be done in a state: drop a value for nothing, or run an op whose inputs are there."""

    def __init__(self, problem: Problem) -> None:
        ops, self.count = problem.graph.ops, len(problem.graph.ops)
        self.reads = [_bits(op.inputs) for op in ops]
        self.makes = [_bits(op.outputs) for op in ops]
        self.again = [op.recomputable for op in ops]
        self.time, self.size = problem.costs.time_ns, problem.costs.size_bytes
        self.room = [problem.budget_bytes - problem.resident_bytes - extra for extra in problem.costs.workspace_bytes]
        self.final = _bits(problem.graph.outputs)
        self.overwrites = [((0, 0), *((1 << value, self.size[value]) for value in op.overwrites)) for op in ops]
        """What may be gone once each op has run, its output being in the same place, and its size: nothing, or one of
        its inputs.
        """

    def is_end(self, state: State) -> bool:
        return state[0] == self.count and state[1] & self.final == self.final

    def after(self, state: State) -> Iterator[tuple[State, int, float]]:
        """Following states, the op that leads there (-1 for a drop) and its extra time."""
        stage, memory = state
        for value in _members(memory):
            yield (stage, memory & ~(1 << value)), -1, 0.0
        held = self._bytes_of(memory)
        for number in range(min(stage + 1, self.count)):
            first, made = number == stage, self.makes[number]
            if self.reads[number] & ~memory or not (first or self.again[number]):
                continue
            needs = held + self._bytes_of(made & ~memory)
            for gone, freed in self.overwrites[number]:
                if needs - freed <= self.room[number]:
                    yield (stage + first, (memory | made) & ~gone), number, 0.0 if first else self.time[number]

    def _bytes_of(self, values: int) -> int:
        return sum(self.size[value] for value in _members(values))


def _bits(values: tuple[int, ...]) -> int:
    return sum(1 << value for value in values)


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def _trace(state: State, came_from: dict[State, tuple[State, int]]) -> Schedule:
    steps: list[OpId] = []
    while state in came_from:
        state, number = came_from[state]
        if number >= 0:
            steps.append(OpId(number))
    return Schedule(tuple(reversed(steps)))
