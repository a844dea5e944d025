"""What is in memory while a step runs, and what is given up for room.

In: values as ops make them. The value whose memory goes is the one with the least cost / (bytes · staleness), where the
cost is the time of its op and of the values around it that are gone as well (dynamic tensor rematerialization, Kirisame
et al. 2020, with the groups of its h_DTR^eq). Only values that autograd saved, that nobody else holds and that can be
computed again are given up. One that is read again is computed again first, with what it lacks.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence

import torch

from remat.core.budget import format_bytes
from remat.pytorch._compat.modes import without_autocast
from remat.pytorch._compat.tensors import storage_uses
from remat.pytorch.living_storages import LivingStorages
from remat.pytorch.online.values import Group, Made, Value

MOST_LOOKED_AT = 256
"""Values among which the one to give up is chosen."""
RESERVED_BYTES, RESERVED_PART = 16 * 1024, 64
"""What of a budget is left free for what no op shows: numbers wrapped in tensors, states of generators."""
FRESH_NS = 1.0
"""Staleness of what was just used."""


class _Candidates:
    """Values that may be given up; of many, some at a time are looked at, as the paper does."""

    def __init__(self) -> None:
        self._values: list[Value] = []
        self._places: dict[int, int] = {}
        self._random = random.Random(0)

    def add(self, value: Value) -> None:
        if id(value) not in self._places:
            self._places[id(value)] = len(self._values)
            self._values.append(value)

    def discard(self, value: Value) -> None:
        place = self._places.pop(id(value), None)
        if place is None:
            return
        last = self._values.pop()
        if last is not value:
            self._values[place] = last
            self._places[id(last)] = place

    def all(self) -> Sequence[Value]:
        return self._values

    def some(self) -> Sequence[Value]:
        if len(self._values) <= MOST_LOOKED_AT:
            return self._values
        return self._random.sample(self._values, MOST_LOOKED_AT)


class Memory:
    """The values of one context, and the bytes that they take."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = self.peak_bytes = 0
        self.clock_ns = self.again_ns = 0.0
        """Time of all ops so far, and of those among them that ran again."""
        self.evictions = self.recomputations = 0
        self.values: LivingStorages[Value] = LivingStorages(self._died)
        self._kept = _Candidates()
        self._has_warned = False

    def add(self, storage: torch.UntypedStorage, value: Value) -> None:
        """A storage came into being; the value is what it holds."""
        self.values.add(storage, value)
        self.live_bytes += value.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def replace(self, storage: torch.UntypedStorage, value: Value) -> None:
        """A storage holds something else now."""
        self.values.add(storage, value)

    def keep(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Autograd saved it."""
        value.kept = storage
        if value.made is not None:
            self._kept.add(value)

    def forget(self, value: Value) -> None:
        self._kept.discard(value)

    def use(self, value: Value) -> None:
        value.used_ns = self.clock_ns

    def make_room(self, need_bytes: int, taken_bytes: int = 0) -> None:
        """Give up values until `need_bytes` fit, and what an op takes meanwhile, as far as that goes."""
        limit = self.budget_bytes - min(RESERVED_BYTES, self.budget_bytes // RESERVED_PART)
        while self.live_bytes + max(need_bytes, taken_bytes) > limit:
            value = self._choose()
            if value is None:
                if self.live_bytes + need_bytes > self.budget_bytes:
                    self._warn(need_bytes)
                break
            self._evict(value)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + need_bytes)

    def _choose(self) -> Value | None:
        return self._best(self._kept.some()) or self._best(self._kept.all())

    def _best(self, candidates: Sequence[Value]) -> Value | None:
        best, chosen = math.inf, None
        for value in candidates:
            if value.locks or value.kept is None or not value.size_bytes or value.made is None:
                continue
            room = value.size_bytes * max(self.clock_ns - value.used_ns, FRESH_NS)
            # Neighbours only add to the cost.
            if value.made.time_ns / room >= best or storage_uses(value.kept) > 1:
                continue
            score = (value.made.time_ns + self._cost_around(value)) / room
            if score < best:
                best, chosen = score, value
        return chosen

    def _cost_around(self, value: Value) -> float:
        roots = {id(root): root for item in _neighbours(value) if item.group and (root := item.group.root())}
        return sum(root.cost_ns for root in roots.values())

    def _evict(self, value: Value) -> None:
        self.evictions += 1
        self.forget(value)
        # What follows from its death is done by `_died`.
        value.kept = None

    def _died(self, value: Value) -> None:
        self.live_bytes -= value.size_bytes
        made = value.made
        if made is None or not (value.handles or value.users):
            return
        value.group = group = Group(made.time_ns)
        for item in _neighbours(value):
            root = item.group.root() if item.group is not None else group
            if root is not group:
                root.parent = group
                group.cost_ns += root.cost_ns

    def fetch(self, value: Value) -> torch.UntypedStorage:
        """Where the value is, after computing it again if need be."""
        self.use(value)
        storage = value.storage()
        if storage is not None:
            return storage
        with torch.no_grad(), without_autocast():
            self._compute(value)
        storage = value.storage()
        assert storage is not None, "a value that was saved can be computed again"
        return storage

    def _compute(self, wanted: Value) -> None:
        stack, helpers = [wanted], []
        _lock(wanted)
        try:
            while stack:
                made = stack[-1].made
                assert made is not None, "what cannot be computed again is kept"
                missing = next((item for item in made.inputs if item.storage() is None), None)
                if missing is not None:
                    stack.append(missing)
                    _lock(missing)
                    continue
                if stack[-1].storage() is None:
                    helpers += self._run(made)
                _unlock(stack.pop())
        finally:
            while stack:
                _unlock(stack.pop())
            for item in helpers:
                if not item.handles:
                    # Computed on the way to others, and saved by nobody.
                    self.forget(item)
                    item.release()

    def _run(self, made: Made) -> list[Value]:
        for item in made.inputs:
            storage = item.storage()
            assert storage is not None, "inputs are computed before an op runs again"
            self.keep(item, storage)
        self.make_room(made.need_bytes + made.copied_bytes())
        gone = [item for item in made.outputs() if item.storage() is None]
        made.run()
        # Its first time, so that what was done can be compared with what could have been.
        self.clock_ns += made.time_ns
        self.again_ns += made.time_ns
        self.recomputations += 1
        for item in gone:
            self._came_back(item, made)
        return [*gone, *made.inputs]

    def _came_back(self, value: Value, made: Made) -> None:
        storage = value.storage()
        assert storage is not None, "an op that ran again made its outputs again"
        if storage in self.values:
            # It was written over what nobody else reads.
            self.replace(storage, value)
        else:
            self.add(storage, value)
        self.use(value)
        # What lies on the way to others may go again, too, should they need the room.
        self._kept.add(value)
        if value.group is not None:
            value.group.root().cost_ns -= made.time_ns
            value.group = None

    def _warn(self, need_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The budget of {format_bytes(self.budget_bytes)} is too small for what cannot be given up here: "
                f"{format_bytes(self.live_bytes + need_bytes)} are needed at once, and the step goes on beyond it.",
                stacklevel=2,
            )


def _neighbours(value: Value) -> Iterator[Value]:
    """What the value was computed from, and what was computed from it."""
    if value.made is not None:
        yield from value.made.inputs
    for reference in value.readers:
        if (made := reference()) is not None:
            yield from made.outputs()


def _lock(value: Value) -> None:
    value.locks += 1
    for item in value.made.inputs if value.made is not None else ():
        item.locks += 1


def _unlock(value: Value) -> None:
    value.locks -= 1
    for item in value.made.inputs if value.made is not None else ():
        item.locks -= 1
