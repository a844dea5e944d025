"""The optimum of a small problem with copies: the shortest path over what is in memory, on the host and on its way.

In: a problem with copies, and the time to beat. Out: the fastest schedule, or a proof that there is none. Beside
running an op, a move begins a copy out, begins a copy back, or drops a value, for which it waits while the value is
copied.
Paths are followed in the order of their time and of what first runs still take (A*). Values are dropped only where
something does not fit: later is never worse. Moves are counted, so larger problems are given up, not waited for.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from remat.core.copies import Copies, Movable, copies_of, movable_of, without_copies
from remat.core.graph import OpId, ValueId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import check_time

MAX_VALUES = 40
MAX_STATES = 20_000

Times = tuple[tuple[int, float], ...]
"""Values, and how long until each is there."""


@dataclass(frozen=True, slots=True)
class CopyState:
    """What is the case; times are counted from now on."""

    stage: int
    memory: Times
    host: Times
    out_free: float = 0.0
    back_free: float = 0.0

    def later(self, by: float) -> CopyState:
        out, back = max(0.0, self.out_free - by), max(0.0, self.back_free - by)
        return CopyState(self.stage, _later(self.memory, by), _later(self.host, by), out, back)


def _later(times: Times, by: float) -> Times:
    return tuple((value, max(0.0, left - by)) for value, left in times)


@dataclass(frozen=True, slots=True)
class Fastest:
    """`schedule` is None where nothing beats the limit; `complete` says that this is proven."""

    schedule: Schedule | None
    complete: bool


def fastest_with_copies(problem: Problem, limit_ns: float, max_states: int = MAX_STATES) -> Fastest:
    """The fastest schedule within the budget that takes less than `limit_ns`."""
    plain = without_copies(problem)
    if plain.graph.value_count > MAX_VALUES or any(op.overwrites for op in plain.graph.ops):
        return Fastest(None, complete=False)
    moves = _Moves(problem, plain)
    start = CopyState(0, (), ())
    best: dict[CopyState, float] = {start: 0.0}
    came_from: dict[CopyState, tuple[CopyState, int]] = {}
    done: set[CopyState] = set()
    queue = [(moves.rest[0], 0, start)]
    pushed = 0
    while queue:
        _, _, moment = heapq.heappop(queue)
        if moment in done:
            continue
        if len(done) >= max_states:
            return Fastest(None, complete=False)
        check_time()
        done.add(moment)
        if moves.is_end(moment):
            return Fastest(_trace(moment, came_from), complete=True)
        for taken, number, following in moves.after(moment):
            time = best[moment] + taken
            if time + moves.rest[following.stage] < limit_ns and time < best.get(following, limit_ns):
                best[following], came_from[following] = time, (moment, number)
                pushed += 1
                heapq.heappush(queue, (time + moves.rest[following.stage], pushed, following))
    return Fastest(None, complete=True)


class _Moves:
    """What can be done at a moment: how long it takes, the op that does it (-1 for none) and what is the case then."""

    def __init__(self, problem: Problem, plain: Problem) -> None:
        self.ops, self.time, self.size = plain.graph.ops, plain.costs.time_ns, plain.costs.size_bytes
        self.workspace = plain.costs.workspace_bytes
        self.room, self.host_room = plain.budget_bytes - plain.resident_bytes, problem.host_budget_bytes
        self.final = set(plain.graph.outputs)
        self.copies: dict[ValueId, Copies] = copies_of(problem.graph)
        self.movable: dict[int, Movable] = {item.value: item for item in movable_of(problem)}
        self.rest = [*reversed(list(accumulate(reversed(self.time), initial=0.0)))]
        """From each stage on, what first runs still take."""

    def is_end(self, moment: CopyState) -> bool:
        there = {value for value, left in moment.memory if not left}
        return moment.stage == len(self.ops) and self.final <= there

    def after(self, moment: CopyState) -> Iterator[tuple[float, int, CopyState]]:
        found, is_full = list(self._runs(moment)), False
        for following in (*found, *self._outs(moment), *self._backs(moment)):
            if following is None:
                is_full = True
            else:
                yield following
        if is_full:
            yield from self._drops(moment)

    def _bytes(self, times: Times) -> int:
        return sum(self.size[value] for value, _ in times)

    def _runs(self, moment: CopyState) -> Iterator[tuple[float, int, CopyState] | None]:
        memory = dict(moment.memory)
        for number, op in enumerate(self.ops[: moment.stage + 1]):
            is_first = number == moment.stage
            if not memory.keys() >= set(op.inputs) or not (is_first or op.recomputable):
                continue
            if not is_first and memory.keys() >= set(op.outputs):
                continue
            wait = max((memory[value] for value in op.inputs), default=0.0)
            ready = moment.later(wait)
            after: dict[int, float] = dict(ready.memory)
            after.update((value, 0.0) for value in op.outputs)
            if sum(self.size[value] for value in after) + self.workspace[number] > self.room:
                yield None
                continue
            ran = CopyState(
                moment.stage + is_first, tuple(sorted(after.items())), ready.host, ready.out_free, ready.back_free
            )
            yield wait + self.time[number], number, ran.later(self.time[number])

    def _outs(self, moment: CopyState) -> Iterator[tuple[float, int, CopyState] | None]:
        host = dict(moment.host)
        for value, left in moment.memory:
            if left or value in host or value not in self.movable or not self.size[value]:
                continue
            if self._bytes(moment.host) + self.size[value] > self.host_room:
                yield None
                continue
            item, op = self.movable[value], self.copies[ValueId(value)].out
            done = moment.out_free + item.out_ns if item.is_beside else 0.0
            sent = tuple(sorted({**host, value: done}.items()))
            out_free = done if item.is_beside else moment.out_free
            begun = CopyState(moment.stage, moment.memory, sent, out_free, moment.back_free)
            waited = 0.0 if item.is_beside else item.out_ns
            yield waited, op, begun.later(waited)

    def _backs(self, moment: CopyState) -> Iterator[tuple[float, int, CopyState] | None]:
        memory = dict(moment.memory)
        for value, left in moment.host:
            if left or value in memory:
                continue
            if self._bytes(moment.memory) + self.size[value] > self.room:
                yield None
                continue
            item, op = self.movable[value], self.copies[ValueId(value)].back
            done = moment.back_free + item.back_ns if item.is_beside else 0.0
            there = tuple(sorted({**memory, value: done}.items()))
            back_free = done if item.is_beside else moment.back_free
            begun = CopyState(moment.stage, there, moment.host, moment.out_free, back_free)
            waited = 0.0 if item.is_beside else item.back_ns
            yield waited, op, begun.later(waited)

    def _drops(self, moment: CopyState) -> Iterator[tuple[float, int, CopyState]]:
        """Of what is there; a copy that is under way is waited for, one on the host may go, too."""
        host = dict(moment.host)
        for value, left in moment.memory:
            if not left:
                rest = tuple(item for item in moment.memory if item[0] != value)
                wait = host.get(value, 0.0)
                dropped = CopyState(moment.stage, rest, moment.host, moment.out_free, moment.back_free).later(wait)
                yield wait, self.copies[ValueId(value)].gone if value in host else -1, dropped
        if self._bytes(moment.host) + max(self.size, default=0) > self.host_room:
            for value, left in moment.host:
                if not left:
                    fewer = tuple(item for item in moment.host if item[0] != value)
                    yield 0.0, -1, CopyState(moment.stage, moment.memory, fewer, moment.out_free, moment.back_free)


def _trace(moment: CopyState, came_from: dict[CopyState, tuple[CopyState, int]]) -> Schedule:
    steps: list[OpId] = []
    while moment in came_from:
        moment, number = came_from[moment]
        if number >= 0:
            steps.append(OpId(number))
    return Schedule(tuple(reversed(steps)))
