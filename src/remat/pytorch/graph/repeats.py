"""Blocks that a step repeats, in the graph that Dynamo captured, and the same graph with most of them left out.

In: the graph of a deep network or of a recurrence that Python unrolls. Out: its runs of alike blocks. Two blocks that
follow each other are alike if each op of the second is that of the first, on tensors laid out alike, where what the
first reads of the block before it the second reads of the first, and what else they read is the same or theirs alone
(as weights are); whole numbers may grow by the same amount from block to block (as the index of a time step does).
Tracing a step costs milliseconds for each op: where blocks repeat, a few of them say what all of them look like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

FIRST, LAST = 4, 4
"""How many blocks at either end of a run are traced."""
LEAST = 40
"""Blocks in a run that are worth it: two short graphs are traced in place of the long one."""
MOST_PERIODS = 64
"""How many lengths of blocks are tried."""
LABEL = "remat_block"
"""Under which tracing hands on the run, its part and the block that an op belongs to."""


class NotAlike(Exception):
    """Blocks differ in a way that only tracing all of them can tell."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions at which a sequence repeats itself."""

    start: int
    period: int
    count: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Alike blocks that follow each other."""

    blocks: tuple[tuple[Node, ...], ...]
    parts: tuple[int, ...]
    """Which part of the graph each node of a block is in: all time steps may be indexed before the first is used."""
    own: tuple[tuple[Node, ...], ...]
    """Inputs of the graph that one block alone reads, in the same order for each."""

    def left_out(self, first: int) -> range:
        """The numbers of the blocks that are not traced where so many are at the start."""
        return range(first, len(self.blocks) - LAST)


@dataclass(frozen=True, slots=True)
class Shortened:
    """A graph without most blocks of its runs."""

    module: GraphModule
    inputs: tuple[Node, ...]
    """What it takes of what the whole one takes."""
    places: tuple[int, ...]
    """The numbers of these."""
    runs: tuple[BlockRun, ...]
    first: int

    def own(self) -> dict[int, tuple[int, int, int]]:
        """Which run, which of its own inputs and which block, numbered as traced, by the number of an input here."""
        places = {node: place for place, node in enumerate(self.inputs)}
        found: dict[int, tuple[int, int, int]] = {}
        for number, run in enumerate(self.runs):
            left_out = run.left_out(self.first)
            kept = (block for block in range(len(run.blocks)) if block not in left_out)
            for traced, block in enumerate(kept):
                found |= {places[node]: (number, slot, traced) for slot, node in enumerate(run.own[block])}
        return found


def find_runs(module: GraphModule) -> tuple[BlockRun, ...]:
    """Long runs of alike blocks; sizes must be known."""
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    if len(nodes) < 2 * LEAST:
        return ()
    stretches = find_stretches([_token(node, node.meta.get("example_value")) for node in nodes], LEAST)
    return tuple(_Alike(nodes, stretches).runs())


def shorten(module: GraphModule, runs: Sequence[BlockRun], first: int = FIRST) -> Shortened:
    """Leave out all but the first and last blocks of each run; ops are labelled by run and block, as traced."""
    graph, made = Graph(), dict[Node, Node]()
    places = {node: (run, block, place) for run in runs for block, row in enumerate(run.blocks)
              for place, node in enumerate(row)}  # fmt: skip
    numbers = {id(run): number for number, run in enumerate(runs)}
    missing = {node for run in runs for block in run.left_out(first) for node in run.own[block]}

    def moved(node: Node, reader: Node) -> Node:
        if node in made:
            return made[node]
        run, block, place = places.get(node, (None, 0, 0))
        reading, number, _ = places.get(reader, (None, 0, 0))
        if run is None or run is not reading or number < len(run.blocks) - LAST:
            raise NotAlike("something reads a block in the middle of a run")
        return made[run.blocks[block - len(run.left_out(first))][place]]

    inputs: dict[Node, int] = {}
    given = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    for node in module.graph.nodes:
        run, block, place = places.get(node, (None, 0, 0))
        if node in missing or (run is not None and block in run.left_out(first)):
            continue
        made[node] = graph.node_copy(node, lambda item, reader=node: moved(item, reader))
        if node.op == "placeholder":
            inputs[node] = given[node]
        if run is not None:
            traced = block if block < first else block - len(run.left_out(first))
            custom = {**(node.meta.get("custom") or {}), LABEL: (numbers[id(run)], run.parts[place], traced)}
            made[node].meta = {**node.meta, "custom": custom}
    return Shortened(GraphModule(module, graph), tuple(inputs), tuple(inputs.values()), tuple(runs), first)


def find_stretches(tokens: Sequence[Hashable], least: int) -> list[Stretch]:
    """Where at least so many alike parts follow each other, in order and without overlaps."""
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(token, len(numbers)) for token in tokens]
    gaps: Counter[int] = Counter()
    seen: dict[int, int] = {}
    for place, item in enumerate(ids):
        if item in seen:
            gaps[place - seen[item]] += 1
        seen[item] = place
    periods = sorted(period for period, _ in gaps.most_common(MOST_PERIODS))
    found: list[Stretch] = []
    pending = [(0, len(ids))]
    while pending:
        low, high = pending.pop()
        options = [item for period in periods for item in _stretches(ids, low, high, period, least)]
        if not options:
            continue
        best = max(options, key=lambda item: (item.period * item.count, -item.period))
        found.append(best)
        pending += [(low, best.start), (best.start + best.period * best.count, high)]
    return sorted(found, key=lambda item: item.start)


def _stretches(ids: Sequence[int], low: int, high: int, period: int, least: int) -> Iterator[Stretch]:
    start = low
    for place in range(low, high - period + 1):
        if place < high - period and ids[place] == ids[place + period]:
            continue
        count = (place - start) // period + 1
        if count >= least:
            yield Stretch(start, period, count)
        start = place + 1


def _token(node: Node, value: Any) -> Hashable:
    """The same for ops that may be alike."""
    target = node.target if node.op != "get_attr" else str(node.target)
    return node.op, target, skeleton((node.args, node.kwargs)), described(value)


def skeleton(arguments: Any) -> Hashable:
    """Arguments of an op where nodes and whole numbers do not count."""
    if isinstance(arguments, Node):
        return Node
    if isinstance(arguments, (tuple, list)):
        return tuple(map(skeleton, arguments))
    if isinstance(arguments, dict):
        return tuple((key, skeleton(item)) for key, item in arguments.items())
    if isinstance(arguments, slice):
        return tuple(map(skeleton, (arguments.start, arguments.stop, arguments.step)))
    return int if type(arguments) is int else (type(arguments).__name__, repr(arguments))


def described(value: Any) -> Hashable:
    """How what an op returns is laid out."""
    if isinstance(value, torch.Tensor):
        kind = (value.dtype, value.device, value.layout, value.requires_grad)
        return (tuple(value.shape), value.stride() if value.layout is torch.strided else (), *kind)
    if isinstance(value, (tuple, list)):
        return tuple(map(described, value))
    return type(value).__name__, repr(value)


def leaves(arguments: Any) -> list[Any]:
    """Nodes and constants, in the order in which `map_aggregate` meets them."""
    found: list[Any] = []
    map_aggregate(arguments, found.append)
    return found


@dataclass(frozen=True, slots=True)
class _Settled:
    """The longest part of a stretch whose blocks are alike in what they read, too."""

    low: int
    high: int
    reads: frozenset[tuple[int, int]]
    """Other stretches of which each block reads the block so many further on."""


class _Alike:
    """Stretches of a graph, block by block."""

    def __init__(self, nodes: Sequence[Node], stretches: Sequence[Stretch]) -> None:
        self._rows = [
            [
                nodes[place : place + item.period]
                for place in range(item.start, item.start + item.period * item.count, item.period)
            ]
            for item in stretches
        ]
        self._places = {
            node: (number, block, place)
            for number, rows in enumerate(self._rows)
            for block, row in enumerate(rows)
            for place, node in enumerate(row)
        }

    def runs(self) -> Iterator[BlockRun]:
        """Stretches of which one reads the other belong to one run."""
        found = ((number, self._settled(number)) for number in range(len(self._rows)))
        settled = {number: item for number, item in found if item is not None}
        left = dict.fromkeys(settled)
        while left:
            ahead = {next(reversed(left)): 0}
            pending = list(ahead)
            while pending:
                reader = pending.pop()
                for number, further in settled[reader].reads if reader in settled else ():
                    if number not in ahead:
                        ahead[number] = ahead[reader] + further
                        pending.append(number)
            for number in ahead:
                left.pop(number, None)
            if ahead.keys() <= settled.keys():
                yield from self._run({number: (settled[number], ahead[number]) for number in sorted(ahead)})

    def _run(self, parts: dict[int, tuple[_Settled, int]]) -> Iterator[BlockRun]:
        """The blocks that all parts have, of which there may be too few."""
        low = max(item.low - ahead for item, ahead in parts.values())
        high = min(item.high - ahead for item, ahead in parts.values())
        if high - low < LEAST:
            return
        blocks = [
            tuple(node for number, (_, ahead) in parts.items() for node in self._rows[number][block + ahead])
            for block in range(low, high)
        ]
        numbers = tuple(place for place, number in enumerate(parts) for _ in self._rows[number][0])
        own = [[item for item in _inputs_of(row) if _is_read_by(item, row)] for row in blocks]
        yield BlockRun(tuple(blocks), numbers, tuple(map(tuple, own)))

    def _settled(self, number: int) -> _Settled | None:
        rows = self._rows[number]
        steps = [self._step(number, block) for block in range(len(rows) - 1)]
        low = best = most = 0
        for block in range(1, len(steps) + 1):
            if block == len(steps) or steps[block] is None or steps[block] != steps[block - 1]:
                if steps[low] is not None and block - low > most:
                    best, most = low, block - low
                low = block
        if most + 1 < LEAST:
            return None
        known = (item for item in steps[best] or () if isinstance(item, tuple) and item[0] == _FURTHER)
        return _Settled(
            best, best + most + 1, frozenset((other, ahead) for _, other, ahead in known if other != number)
        )

    def _step(self, number: int, block: int) -> tuple[Hashable, ...] | None:
        """How what a block reads differs in the next one; None where it does so in another way."""
        one, other = self._rows[number][block : block + 2]
        inputs, others = (dict(zip(_inputs_of(row), range(10**9), strict=False)) for row in (one, other))
        found: list[Hashable] = []
        for left, right in zip(one, other, strict=True):
            pairs = zip(leaves((left.args, left.kwargs)), leaves((right.args, right.kwargs)), strict=True)
            for before, after in pairs:
                if type(before) is int and type(after) is int:
                    found.append(after - before)
                elif not isinstance(before, Node) or (before is after and before not in self._places):
                    found.append("same")
                elif before in inputs and inputs[before] == others.get(after):
                    alone = _is_read_by(before, one) and _is_read_by(after, other)
                    found.append(("own", inputs[before]) if alone and _are_alike(before, after) else None)
                else:
                    found.append(self._further(number, block, before, after))
        return None if None in found else tuple(found)

    def _further(self, number: int, block: int, before: Node, after: Any) -> Hashable:
        """Of which stretch and how many blocks further on a block reads, and the next one too."""
        stretch, read, place = self._places.get(before, (-1, 0, 0))
        if stretch < 0 or self._places.get(after) != (stretch, read + 1, place):
            return None
        is_near = stretch != number or 0 <= block - read < FIRST - 1
        return (_FURTHER, stretch, read - block) if is_near else None


_FURTHER = "further"


def _inputs_of(row: Sequence[Node]) -> list[Node]:
    read = (item for node in row for item in node.all_input_nodes if item.op == "placeholder")
    return list(dict.fromkeys(read))


def _is_read_by(item: Node, row: Sequence[Node]) -> bool:
    """Whether nothing else reads it; what every block reads has many readers, which are not looked at."""
    return len(item.users) <= len(row) and set(item.users) <= set(row)


def _are_alike(one: Node, other: Node) -> bool:
    left, right = one.meta.get("example_value"), other.meta.get("example_value")
    return type(left) is type(right) and described(left) == described(right)
