"""A schedule that can be changed step by step while its memory is known exactly at every step.

Stage t is everything from the end of op t-1's first run to the end of op t's; stage n comes after all of them. Within a
stage, ops run again in graph order before op t, at most once each, so that a step is one integer, its key: stage * n +
op. Adding or removing a
recomputation changes the live bytes on a few ranges of steps only; those are slices of one array.

A version of a value lives from its computation to its last use before the next one, as in `core.schedule`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.deadline import check_time

END_KEY = 2**62
"""The key of the end of the step: outputs are used there."""


@dataclass(frozen=True, slots=True)
class FlatProblem:
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


def flatten(problem: Problem) -> FlatProblem:
    ops, size = problem.graph.ops, problem.costs.size_bytes
    return FlatProblem(
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


class EditableSchedule:
    """Steps in order of key, with `load[k]` the live bytes while step k runs."""

    def __init__(self, problem: Problem, steps: Sequence[int] = ()) -> None:
        """The plain schedule with the recomputations `steps`, given as keys, added."""
        self.flat = flatten(problem)
        count = self.flat.count
        keys = sorted([*range(0, count * (count + 1), count + 1), *steps])
        self.length = len(keys)
        self._keys: NDArray[np.int64] = np.zeros(2 * self.length + 16, dtype=np.int64)
        self._load: NDArray[np.int64] = np.zeros(2 * self.length + 16, dtype=np.int64)
        self._keys[: self.length] = keys
        self.computes: list[list[int]] = [[] for _ in range(count)]
        self.uses: list[list[int]] = [[] for _ in self.flat.size]
        for key in keys:
            number = key % count
            self.computes[number].append(key)
            for value in self.flat.inputs[number]:
                self.uses[value].append(key)
        for value in self.flat.final:
            self.uses[value].append(END_KEY)
        self.extra_time = float(sum(self.flat.time[key % count] for key in steps))
        self.work = 0
        """Steps inserted, removed or weighed so far: a clock that runs alike on every machine."""
        self.journal: list[int] = []
        """Keys in the order of change, as `key` for an insertion and `~key` for a removal."""
        self._load[: self.length] = self._first_load(keys)

    @property
    def keys(self) -> NDArray[np.int64]:
        return self._keys[: self.length]

    @property
    def load(self) -> NDArray[np.int64]:
        return self._load[: self.length]

    @property
    def peak(self) -> int:
        return int(self.load.max()) if self.length else self.flat.resident

    def schedule(self) -> Schedule:
        count = max(self.flat.count, 1)
        return Schedule(tuple(OpId(number) for number in (self.keys % count).tolist()))

    def extra_steps(self) -> list[int]:
        """The keys of all recomputations, in order."""
        firsts = self.flat.count + 1
        return [int(key) for key in self.keys if key % firsts]

    def position(self, key: int) -> int:
        return int(self._keys[: self.length].searchsorted(key))

    def version(self, value: int, key: int) -> tuple[int, int]:
        """Birth and last use of the version of `value` that a step at `key` would read."""
        computes = self.computes[self.flat.producer[value]]
        at = bisect_left(computes, key)
        birth = computes[at - 1]
        upper = computes[at] if at < len(computes) else END_KEY + 1
        uses = self.uses[value]
        last = bisect_left(uses, upper) - 1
        return birth, uses[last] if last >= 0 and uses[last] > birth else birth

    def insert(self, key: int) -> None:
        """Run op `key % n` again in stage `key // n`; it must not run there yet."""
        check_time()
        flat, number = self.flat, key % self.flat.count
        self.work += 1
        place = self._open(key)
        for value in flat.outputs[number]:
            birth, last = self.version(value, key)
            if last > key:
                self._add(self._last_before(value, birth, key), key, -flat.size[value])
            else:
                self._load[place] += flat.size[value]
        for value in flat.inputs[number]:
            _, last = self.version(value, key)
            if last < key:
                self._add(last, key + 1, flat.size[value])
            insort(self.uses[value], key)
        insort(self.computes[number], key)
        self.extra_time += flat.time[number]
        self.journal.append(key)

    def remove(self, key: int) -> None:
        """Undo an insertion; the version before lives on in its place."""
        check_time()
        flat, number = self.flat, key % self.flat.count
        self.work += 1
        computes = self.computes[number]
        del computes[bisect_left(computes, key)]
        for value in flat.inputs[number]:
            uses = self.uses[value]
            del uses[bisect_left(uses, key)]
            _, last = self.version(value, key)
            if last < key:
                self._add(last, key + 1, -flat.size[value])
        for value in flat.outputs[number]:
            birth, last = self.version(value, key)
            if last > key:
                self._add(self._last_before(value, birth, key), key, flat.size[value])
        place = self.position(key)
        self._keys[place : self.length - 1] = self._keys[place + 1 : self.length]
        self._load[place : self.length - 1] = self._load[place + 1 : self.length]
        self.length -= 1
        self.extra_time -= flat.time[number]
        self.journal.append(~key)

    def send_away(self, value: int, after: int, before: int) -> None:
        """Take a value to be elsewhere in every step whose key lies strictly between `after` and `before`.

        It is there again at `before`, whether or not anything reads it then.
        """
        self._add(after, before, -self.flat.size[value])
        insort(self.uses[value], before)

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
        computes = self.computes[key % self.flat.count]
        at = bisect_left(computes, key)
        return at < len(computes) and computes[at] == key

    def is_used(self, key: int) -> bool:
        """Does anything read what the step at `key` computes?"""
        return any(self.version(value, key + 1)[1] > key for value in self.flat.outputs[key % self.flat.count])

    def _open(self, key: int) -> int:
        """Make room for a step and give it what lives through it, plus its workspace."""
        if self.length + 1 >= len(self._keys):
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
            self._load = np.concatenate([self._load, np.zeros_like(self._load)])
        place, length, count = self.position(key), self.length, self.flat.count
        if place < length:
            following = int(self._keys[place]) % count
            through = int(self._load[place]) - self.flat.workspace[following] - self.flat.output_bytes[following]
        else:
            through = self.flat.resident + self.flat.final_bytes
        self._keys[place + 1 : length + 1] = self._keys[place:length]
        self._load[place + 1 : length + 1] = self._load[place:length]
        self._keys[place] = key
        self._load[place] = through + self.flat.workspace[key % count]
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

    def _first_load(self, keys: Sequence[int]) -> NDArray[np.int64]:
        """The load of every step, going backwards: the first use met is the last one of the version before it."""
        flat, count = self.flat, self.flat.count
        last = [-1] * len(flat.size)
        for value in flat.final:
            last[value] = len(keys) - 1
        change = [0] * (len(keys) + 1)
        for step in range(len(keys) - 1, -1, -1):
            number = keys[step] % count
            for value in flat.outputs[number]:
                change[step] += flat.size[value]
                change[max(last[value], step) + 1] -= flat.size[value]
                last[value] = -1
            for value in flat.inputs[number]:
                if last[value] < 0:
                    last[value] = step
        workspace = np.array([flat.workspace[key % count] for key in keys], dtype=np.int64)
        return flat.resident + np.cumsum(np.array(change[:-1], dtype=np.int64)) + workspace


def extra_keys(schedule: Schedule, count: int) -> list[int] | None:
    """The keys of the schedule's recomputations; None where an editable schedule cannot hold it."""
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
