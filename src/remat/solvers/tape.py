"""A schedule that can be changed step by step while its memory is known exactly at every step.

Stage t is everything from the end of op t-1's first run to the end of op t's; stage n comes after all of them. Within a
stage, ops run again in graph order before op t, at most once each, so that a step is one integer, its key: stage * n +
op. Adding or removing a
recomputation changes the live bytes on a few ranges of steps only; those are slices of one array.

A version of a value lives from its computation to its last use before the next one, as in `core.schedule`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule

END = 2**62
"""The key of the end of the step: outputs are used there."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a problem that searches read most, as plain tuples of numbers."""

    count: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    output_bytes: tuple[int, ...]
    """Bytes that each op's outputs take together."""
    size: tuple[int, ...]
    workspace: tuple[int, ...]
    time: tuple[float, ...]
    producer: tuple[int, ...]
    recomputable: tuple[bool, ...]
    final: frozenset[int]
    """Values that live to the end."""
    final_bytes: int
    resident: int


def shape_of(problem: Problem) -> Shape:
    ops, size = problem.graph.ops, problem.costs.size_bytes
    return Shape(
        count=len(ops),
        inputs=tuple(op.inputs for op in ops),
        outputs=tuple(op.outputs for op in ops),
        output_bytes=tuple(sum(size[value] for value in op.outputs) for op in ops),
        size=size,
        workspace=problem.costs.workspace_bytes,
        time=problem.costs.time_ns,
        producer=problem.graph.producers(),
        recomputable=tuple(op.recomputable for op in ops),
        final=frozenset(problem.graph.outputs),
        final_bytes=sum(size[value] for value in problem.graph.outputs),
        resident=problem.resident_bytes,
    )


class Tape:
    """Steps in order of key, with `load[k]` the live bytes while step k runs."""

    def __init__(self, problem: Problem) -> None:
        self.shape = shape_of(problem)
        count = self.shape.count
        self.length = count
        self._keys: NDArray[np.int64] = np.zeros(2 * count + 16, dtype=np.int64)
        self._load: NDArray[np.int64] = np.zeros(2 * count + 16, dtype=np.int64)
        self._keys[:count] = np.arange(count, dtype=np.int64) * (count + 1)
        self.computes: list[list[int]] = [[number * (count + 1)] for number in range(count)]
        self.uses: list[list[int]] = [[] for _ in self.shape.size]
        for number, inputs in enumerate(self.shape.inputs):
            for value in inputs:
                self.uses[value].append(number * (count + 1))
        for value in self.shape.final:
            self.uses[value].append(END)
        self.extra_time = 0.0
        self.work = 0
        """Steps inserted, removed or weighed so far: a clock that runs alike on every machine."""
        self.journal: list[int] = []
        """Keys in the order of change, as `key` for an insertion and `~key` for a removal."""
        self._load[:count] = self._plain_load()

    @property
    def keys(self) -> NDArray[np.int64]:
        return self._keys[: self.length]

    @property
    def load(self) -> NDArray[np.int64]:
        return self._load[: self.length]

    @property
    def peak(self) -> int:
        return int(self.load.max()) if self.length else self.shape.resident

    def schedule(self) -> Schedule:
        count = max(self.shape.count, 1)
        return Schedule(tuple(OpId(int(key) % count) for key in self.keys))

    def extra_steps(self) -> list[int]:
        """The keys of all recomputations, in order."""
        firsts = self.shape.count + 1
        return [int(key) for key in self.keys if key % firsts]

    def position(self, key: int) -> int:
        return int(self._keys[: self.length].searchsorted(key))

    def version(self, value: int, key: int) -> tuple[int, int]:
        """Birth and last use of the version of `value` that a step at `key` would read."""
        computes = self.computes[self.shape.producer[value]]
        at = bisect_left(computes, key)
        birth = computes[at - 1]
        upper = computes[at] if at < len(computes) else END + 1
        uses = self.uses[value]
        last = bisect_left(uses, upper) - 1
        return birth, uses[last] if last >= 0 and uses[last] > birth else birth

    def insert(self, key: int) -> None:
        """Run op `key % n` again in stage `key // n`; it must not run there yet."""
        shape, number = self.shape, key % self.shape.count
        self.work += 1
        place = self._open(key)
        for value in shape.outputs[number]:
            birth, last = self.version(value, key)
            if last > key:
                self._add(self._last_before(value, birth, key), key, -shape.size[value])
            else:
                self._load[place] += shape.size[value]
        for value in shape.inputs[number]:
            _, last = self.version(value, key)
            if last < key:
                self._add(last, key + 1, shape.size[value])
            insort(self.uses[value], key)
        insort(self.computes[number], key)
        self.extra_time += shape.time[number]
        self.journal.append(key)

    def remove(self, key: int) -> None:
        """Undo an insertion; the version before lives on in its place."""
        shape, number = self.shape, key % self.shape.count
        self.work += 1
        computes = self.computes[number]
        del computes[bisect_left(computes, key)]
        for value in shape.inputs[number]:
            uses = self.uses[value]
            del uses[bisect_left(uses, key)]
            _, last = self.version(value, key)
            if last < key:
                self._add(last, key + 1, -shape.size[value])
        for value in shape.outputs[number]:
            birth, last = self.version(value, key)
            if last > key:
                self._add(self._last_before(value, birth, key), key, shape.size[value])
        place = self.position(key)
        self._keys[place : self.length - 1] = self._keys[place + 1 : self.length]
        self._load[place : self.length - 1] = self._load[place + 1 : self.length]
        self.length -= 1
        self.extra_time -= shape.time[number]
        self.journal.append(~key)

    def rewind(self, mark: int) -> None:
        """Undo every change since the journal had length `mark`."""
        while len(self.journal) > mark:
            change = self.journal.pop()
            if change >= 0:
                self.remove(change)
            else:
                self.insert(~change)
            self.journal.pop()

    def runs(self, key: int) -> bool:
        """Is there a step at `key`?"""
        computes = self.computes[key % self.shape.count]
        at = bisect_left(computes, key)
        return at < len(computes) and computes[at] == key

    def is_used(self, key: int) -> bool:
        """Does anything read what the step at `key` computes?"""
        return any(self.version(value, key + 1)[1] > key for value in self.shape.outputs[key % self.shape.count])

    def _open(self, key: int) -> int:
        """Make room for a step and give it what lives through it, plus its workspace."""
        if self.length + 1 >= len(self._keys):
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
            self._load = np.concatenate([self._load, np.zeros_like(self._load)])
        place, length, count = self.position(key), self.length, self.shape.count
        if place < length:
            following = int(self._keys[place]) % count
            through = int(self._load[place]) - self.shape.workspace[following] - self.shape.output_bytes[following]
        else:
            through = self.shape.resident + self.shape.final_bytes
        self._keys[place + 1 : length + 1] = self._keys[place:length]
        self._load[place + 1 : length + 1] = self._load[place:length]
        self._keys[place] = key
        self._load[place] = through + self.shape.workspace[key % count]
        self.length += 1
        return place

    def _add(self, after: int, before: int, amount: int) -> None:
        """Add `amount` to the load of every step whose key lies strictly between `after` and `before`."""
        if amount:
            keys = self._keys[: self.length]
            self._load[keys.searchsorted(after, "right") : keys.searchsorted(before)] += amount

    def _last_before(self, value: int, birth: int, key: int) -> int:
        uses = self.uses[value]
        at = bisect_left(uses, key) - 1
        return uses[at] if at >= 0 and uses[at] > birth else birth

    def _plain_load(self) -> NDArray[np.int64]:
        shape, count = self.shape, self.shape.count
        change = np.zeros(count + 1, dtype=np.int64)
        for value, number in enumerate(shape.producer):
            last = self.uses[value][-1] if self.uses[value] else number * (count + 1)
            change[number] += shape.size[value]
            change[(count - 1 if last == END else last // (count + 1)) + 1] -= shape.size[value]
        return shape.resident + np.cumsum(change[:count]) + np.array(shape.workspace, dtype=np.int64)


def extra_keys(schedule: Schedule, count: int) -> list[int] | None:
    """The keys of the schedule's recomputations; None where a tape cannot hold it."""
    keys: list[int] = []
    stage, last = 0, -1
    for number in schedule.steps:
        if number == stage:
            stage, last = stage + 1, -1
        elif number <= last:
            return None
        else:
            keys.append(stage * count + number)
            last = number
    return keys
