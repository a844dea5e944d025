"""The trace of a deep model from that of a shallow one: repeated blocks are traced once and written down often.

In: a trace of a model with `TRACED` members in its one list of blocks. Out: the same with any number of them, or None
where blocks are not copies of each other: what a block reads must be its own, its neighbour's, or there before the
first. Two blocks from the middle are compared op by op, so that what is repeated is known to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from remat.fit.step_trace import StepTrace, TracedCall, TracedParameter

TRACED = 4
"""Two in the middle that must be alike, and the ends, which may differ."""
_MODEL, _COPY = 2, 1
"""Copies come after block 1, and are like it; block 2 shows that the middle repeats."""

Spot = tuple[bool, int, int, int]
"""Of a value that a block makes: in backward or not, which block, which of its ops, which of that op's results."""


def deepen(trace: StepTrace, layers: int) -> StepTrace | None:
    """`trace`, of `TRACED` blocks, with `layers` of them; None where it cannot be known."""
    if len(trace.blocks) != TRACED or layers < TRACED or len({_home(name) for name in trace.blocks}) != 1:
        return None
    parts = _cut(trace)
    if parts is None or not _repeats(trace, parts):
        return None
    return _Writer(trace, parts, layers).write()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where the ops of each block are, as ranges of positions; `spots` of the values that they make."""

    forward: tuple[range, ...]
    backward: tuple[range, ...]
    spots: dict[int, Spot]

    def of(self, block: int, *, backward: bool) -> range:
        return (self.backward if backward else self.forward)[block]


def _cut(trace: StepTrace) -> _Parts | None:
    """Each block's ops go from its first one to the next block's; None where blocks are not one after the other."""
    places: dict[tuple[bool, int], list[int]] = {}
    for place, call in enumerate(trace.calls):
        block = trace.block_of(call.module)
        if block:
            places.setdefault((call.backward, trace.blocks.index(block)), []).append(place)
    order = [(False, block) for block in range(TRACED)] + [(True, block) for block in reversed(range(TRACED))]
    if sorted(places) != sorted(order):
        return None
    starts = [min(places[key]) for key in order]
    ends = [
        starts[number + 1] if number not in (TRACED - 1, len(order) - 1) else max(places[key]) + 1
        for number, key in enumerate(order)
    ]
    if starts != sorted(starts) or any(max(places[key]) >= end for key, end in zip(order, ends, strict=True)):
        return None
    ranges = {key: range(start, end) for key, start, end in zip(order, starts, ends, strict=True)}
    spots = {
        value: (backward, block, place - part.start, number)
        for (backward, block), part in ranges.items()
        for place in part
        for number, value in enumerate(trace.calls[place].makes)
    }
    forward, back = (tuple(ranges[way, block] for block in range(TRACED)) for way in (False, True))
    return _Parts(forward, back, spots)


def _repeats(trace: StepTrace, parts: _Parts) -> bool:
    """Whether blocks 1 and 2 are alike, and nobody outside reads what they make."""
    inside = {place for part in (*parts.forward, *parts.backward) for place in part}
    middle = {value for value, spot in parts.spots.items() if spot[1] in (_COPY, _MODEL)}
    outside = [trace.calls[place] for place in range(len(trace.calls)) if place not in inside]
    if any(not middle.isdisjoint(call.reads) for call in outside) or not middle.isdisjoint(trace.outputs):
        return False
    if any(_held(parts, call, _COPY) != _held(parts, call, _MODEL) for call in outside):
        return False
    return all(_likeness(trace, parts, _COPY, way) == _likeness(trace, parts, _MODEL, way) for way in (False, True))


def _likeness(trace: StepTrace, parts: _Parts, block: int, backward: bool) -> list[object]:
    """What a block does, with its neighbours named by how far away they are."""
    return [
        (
            *(call.target, call.time_ns, call.workspace_bytes, call.recomputable, call.module.count(".")),
            tuple(_relative(parts.spots.get(value), value, block) for value in (*call.reads, -1, *call.holds)),
            tuple((trace.sizes[value], value in trace.gradients) for value in call.makes),
        )
        for call in (trace.calls[place] for place in parts.of(block, backward=backward))
    ]


def _held(parts: _Parts, call: TracedCall, block: int) -> list[object]:
    """What of a block lives until an op outside: autocast keeps casts of weights until forward is over."""
    return sorted(
        _relative(spot, value, block)
        for value in call.holds
        if (spot := parts.spots.get(value)) is not None and spot[1] == block
    )


def _relative(spot: Spot | None, value: int, block: int) -> Any:
    return value if spot is None else (spot[0], spot[1] - block, *spot[2:])


class _Writer:
    """Writes the calls anew with blocks 0, 1, copies of 1, and the last two."""

    def __init__(self, trace: StepTrace, parts: _Parts, layers: int) -> None:
        self._trace, self._parts, self._layers = trace, parts, layers
        self._calls: list[TracedCall] = []
        self._sizes: list[int] = []
        self._numbers: dict[int | Spot, int] = {}
        self._gradients: dict[int, str] = {}

    def write(self) -> StepTrace:
        forward, backward = self._parts.forward, self._parts.backward
        self._outside(range(forward[0].start))
        for block in range(self._layers):
            self._block(block, backward=False)
        self._outside(range(forward[-1].stop, backward[-1].start))
        for block in reversed(range(self._layers)):
            self._block(block, backward=True)
        self._outside(range(backward[0].stop, len(self._trace.calls)))
        blocks = tuple(self._renamed(self._trace.blocks[0], number) for number in range(self._layers))
        return replace(
            self._trace,
            calls=tuple(self._calls),
            sizes=tuple(self._sizes),
            gradients=self._gradients,
            outputs=tuple(self._numbers[self._neighbour(value, 0, None)] for value in self._trace.outputs),
            parameters=tuple(self._parameters()),
            blocks=blocks,
            children={},
        )

    def _outside(self, places: Iterable[int]) -> None:
        for place in places:
            self._call(self._trace.calls[place], 0, None)

    def _block(self, block: int, *, backward: bool) -> None:
        source = self._source(block)
        for place in self._parts.of(source, backward=backward):
            self._call(self._trace.calls[place], block - source, block)

    def _source(self, block: int) -> int:
        """The traced block that this one is like."""
        if block <= _COPY:
            return block
        return max(_COPY, block - (self._layers - TRACED))

    def _call(self, call: TracedCall, shift: int, block: int | None) -> None:
        reads = tuple(self._numbers[self._neighbour(value, shift, block)] for value in call.reads)
        holds = tuple(self._numbers[key] for value in call.holds for key in self._holders(value, shift, block))
        makes = []
        for value in call.makes:
            number = len(self._sizes)
            self._numbers[self._neighbour(value, shift, block)] = number
            self._sizes.append(self._trace.sizes[value])
            if value in self._trace.gradients:
                self._gradients[number] = self._renamed(self._trace.gradients[value], block)
            makes.append(number)
        module = self._renamed(call.module, block)
        self._calls.append(replace(call, module=module, reads=reads, makes=tuple(makes), holds=holds))

    def _neighbour(self, value: int, shift: int, block: int | None) -> int | Spot:
        """In a block, neighbours are found by their distance; outside, by where they were moved to."""
        spot = self._parts.spots.get(value)
        if spot is None:
            return value
        away = shift if block is not None else self._layers - TRACED if spot[1] > _COPY else 0
        return (spot[0], spot[1] + away, *spot[2:])

    def _holders(self, value: int, shift: int, block: int | None) -> Iterable[int | Spot]:
        """Outside of blocks, what is held of the block that is copied is held of all copies."""
        spot = self._parts.spots.get(value)
        if block is not None or spot is None or spot[1] != _COPY:
            return (self._neighbour(value, shift, block),)
        return ((spot[0], copy, *spot[2:]) for copy in range(_COPY, _COPY + self._layers - TRACED + 1))

    def _renamed(self, name: str, block: int | None) -> str:
        """A module or parameter of the traced block, under the name it has in block number `block`."""
        inside = self._trace.block_of(name)
        if not inside or block is None:
            return name
        return f"{_home(inside)}.{block}{name[len(inside) :]}"

    def _parameters(self) -> Iterable[TracedParameter]:
        by_block: dict[str, list[TracedParameter]] = {name: [] for name in self._trace.blocks}
        first = ""
        for item in self._trace.parameters:
            block = self._trace.block_of(item.name)
            first = first or block
            if block:
                by_block[block].append(item)
        for item in self._trace.parameters:
            block = self._trace.block_of(item.name)
            if not block:
                yield item
            elif block == first and item is by_block[block][0]:
                for number in range(self._layers):
                    members = by_block[self._trace.blocks[self._source(number)]]
                    yield from (replace(each, name=self._renamed(each.name, number)) for each in members)


def _home(block: str) -> str:
    return block.rpartition(".")[0]
