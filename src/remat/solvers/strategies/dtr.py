"""Dynamic tensor rematerialization, simulated (Kirisame et al. 2021): evict online, as if the future were unknown.

Ops run in the graph's order. Where an op's outputs do not fit, the value with the least cost / (bytes · staleness) is
evicted; one that is read again is computed again first, recursively. Cost is the time of the value's op, or with
`Cost.NEIGHBOURHOOD` also that of the evicted values around it, which eviction would tie to it: they are counted in
groups that merge as neighbours are evicted and lose what is computed again, as in the paper's h_DTR^eq. A value is let
go once no op of the graph that has not run reads it, as a framework does. If the budget is too small for that, larger
limits are tried for the smallest peak.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import final

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import check_time
from remat.core.simulate import simulate
from remat.solvers.base import Strategy
from remat.solvers.schedule.editable import FlatProblem, flatten
from remat.solvers.schedule.evict import MAX_GROWTH_FACTOR

LARGER_LIMITS = 4
"""Larger limits to try where the budget is too small, by halving the distance to the plain peak."""
FRESH_STALENESS = 1e-9
"""Staleness of what was just used."""


class Cost(Enum):
    LOCAL = "local"
    NEIGHBOURHOOD = "neighbourhood"


@final
@dataclass(frozen=True, slots=True)
class Dtr(Strategy):
    name: str = "dtr"
    cost: Cost = Cost.NEIGHBOURHOOD

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        plain, flat = plain_schedule(problem.graph), flatten(problem)
        yield plain
        low, high = problem.budget_bytes, simulate(problem, plain).peak_bytes
        steps = run_online(flat, low, self.cost)
        if steps is not None:
            yield steps
            return
        for _ in range(LARGER_LIMITS):
            limit = (low + high) // 2
            steps = run_online(flat, limit, self.cost)
            if steps is None:
                low = limit
            else:
                high = limit
                yield steps


def run_online(flat: FlatProblem, limit_bytes: int, cost: Cost) -> Schedule | None:
    """The schedule that evicting within `limit_bytes` leads to; None where an op does not fit or it thrashes."""
    memory = _Memory(flat, limit_bytes, cost)
    for op in range(flat.count):
        if not memory.compute(op):
            return None
        memory.forget(op)
    for value in sorted(flat.final):
        if not memory.fetch(value):
            return None
    return Schedule(tuple(memory.steps))


class _Memory:
    """What is in memory while ops run, and what it would cost to have the rest again."""

    def __init__(self, flat: FlatProblem, limit_bytes: int, cost: Cost) -> None:
        values = range(len(flat.size))
        self.flat, self.limit, self.cost = flat, limit_bytes, cost
        self.steps: list[OpId] = []
        self.clock, self.live = 0.0, flat.resident
        self.here: set[int] = set()
        self.ran: set[int] = set()
        self.locks, self.used = [0 for _ in values], [0.0 for _ in values]
        self.readers: list[list[int]] = [[] for _ in values]
        for op, inputs in enumerate(flat.inputs):
            for value in inputs:
                self.readers[value].append(op)
        self.unread = [len(readers) for readers in self.readers]
        self.groups = _Groups(len(values))

    def fetch(self, value: int) -> bool:
        """Have the value in memory, and keep it there."""
        self.locks[value] += 1
        return value in self.here or self.compute(self.flat.producer[value])

    def compute(self, root: int) -> bool:
        """Run the op, after the ops whose results it lacks; False where it cannot be done within the limit."""
        stack = [root]
        self._lock(root)
        while stack:
            op = stack[-1]
            missing = next((value for value in self.flat.inputs[op] if value not in self.here), None)
            if missing is not None:
                stack.append(self.flat.producer[missing])
                self._lock(stack[-1])
            elif self._run(op):
                stack.pop()
                self._unlock(op)
            else:
                return False
        return True

    def forget(self, op: int) -> None:
        """Let go of what no op still to run for the first time reads."""
        for value in self.flat.inputs[op]:
            self.unread[value] -= 1
        for value in (*self.flat.inputs[op], *self.flat.outputs[op]):
            self._let_go(value)

    def _lock(self, op: int) -> None:
        for value in self.flat.inputs[op]:
            self.locks[value] += 1

    def _unlock(self, op: int) -> None:
        for value in self.flat.inputs[op]:
            self.locks[value] -= 1
            self._let_go(value)

    def _let_go(self, value: int) -> None:
        if not self.unread[value] and value not in self.flat.final and self._may_go(value):
            self._evict(value)

    def _may_go(self, value: int) -> bool:
        return value in self.here and not self.locks[value] and self.flat.recomputable[self.flat.producer[value]]

    def _run(self, op: int) -> bool:
        check_time()
        flat, again = self.flat, op in self.ran
        # Too many steps are thrashing.
        if (again and not flat.recomputable[op]) or len(self.steps) > MAX_GROWTH_FACTOR * flat.count:
            return False
        fresh = [value for value in flat.outputs[op] if value not in self.here]
        made = sum(flat.size[value] for value in fresh)
        if not self._make_room(made + flat.workspace[op], flat.outputs[op]):
            return False
        self.live += made
        self.steps.append(OpId(op))
        self.clock += flat.time[op]
        self.ran.add(op)
        self.here.update(fresh)
        if again:
            for value in fresh:
                self.groups.leave(value, flat.time[op])
        for value in (*flat.inputs[op], *flat.outputs[op]):
            self.used[value] = self.clock
        return True

    def _make_room(self, need: int, spared: tuple[int, ...]) -> bool:
        while self.live + need > self.limit:
            worst = self._choose(set(spared))
            if worst is None:
                return False
            self._evict(worst)
        return True

    def _choose(self, spared: set[int]) -> int | None:
        """The value whose eviction costs least for its bytes and staleness."""
        check_time()
        size, time, producer = self.flat.size, self.flat.time, self.flat.producer
        heap = []
        for value in self.here:
            if size[value] and value not in spared and self._may_go(value):
                room = size[value] * max(self.clock - self.used[value], FRESH_STALENESS)
                heap.append((time[producer[value]] / room, value, room))
        heapq.heapify(heap)
        if self.cost is Cost.LOCAL:
            return heap[0][1] if heap else None
        best: tuple[float, int] | None = None
        # Neighbours only add to the cost, so the search can end where the local score alone is worse.
        while heap and (best is None or heap[0][0] < best[0]):
            score, value, room = heapq.heappop(heap)
            around = self.groups.cost(self._neighbours(value))
            best = min(best or (math.inf, value), (score + around / room, value))
        return best[1] if best else None

    def _evict(self, value: int) -> None:
        self.here.discard(value)
        self.live -= self.flat.size[value]
        self.groups.join(value, self.flat.time[self.flat.producer[value]], self._neighbours(value))

    def _neighbours(self, value: int) -> Iterator[int]:
        """What the value was computed from, and what was computed from it."""
        yield from self.flat.inputs[self.flat.producer[value]]
        for op in self.readers[value]:
            if op in self.ran:
                yield from self.flat.outputs[op]


class _Groups:
    """Evicted values that would be computed again together, and the time that takes: disjoint sets."""

    def __init__(self, count: int) -> None:
        self.node = [-1] * count
        self.parent: list[int] = []
        self.weight: list[float] = []

    def join(self, value: int, time: float, neighbours: Iterable[int]) -> None:
        self.node[value] = root = len(self.parent)
        self.parent.append(root)
        self.weight.append(time)
        for other in self._roots(neighbours):
            if other != root:
                self.parent[other] = root
                self.weight[root] += self.weight[other]

    def leave(self, value: int, time: float) -> None:
        self.weight[self._root(self.node[value])] -= time
        self.node[value] = -1

    def cost(self, neighbours: Iterable[int]) -> float:
        return sum(self.weight[root] for root in self._roots(neighbours))

    def _roots(self, values: Iterable[int]) -> set[int]:
        return {self._root(self.node[value]) for value in values if self.node[value] >= 0}

    def _root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node
