"""The joint graph of a long step, written from that of a short one: blocks in the middle of a run are copied.

In: the joint graph of a step without most blocks of its runs (`repeats.py`), whose nodes are labelled with the run and
block that they come from. In forward and in backward, the nodes of a run then repeat with a period: node by node, each
block reads what the one before it reads, one block further on. Out: the same graph with the missing blocks, each a copy
of the last one before the gap that reads as many blocks further on. Whoever uses this compares what it writes for one
block more with what tracing finds for one block more.

Blocks are numbered as traced: those before the gap from 0 to `first - 1`, those after it from `first` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from remat.pytorch._compat.fakes import FakeLike
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.graph.nodes import add_node, is_tangent, set_field, tensors_in
from remat.pytorch.graph.repeats import LABEL, BlockRun, NotAlike, described, leaves, skeleton

Own = Mapping[Node, tuple[int, int, int]]
"""Inputs of a traced graph that one block alone reads: run, which of them, and block."""
Place = tuple[int, int, int]
"""RepeatedPart, block and position in it."""
_SHIFT, _OWN, _SAME = "shift", "own", "same"
_MODULES = "nn_module_stack"
"""Under which Dynamo and AOTAutograd keep where a node is computed."""


@dataclass(frozen=True, slots=True)
class RepeatedPart:
    """Where the nodes of one run repeat, in forward or in backward."""

    run: int
    low: int
    cut: int
    """The position of the first node after the gap."""
    high: int
    period: int
    is_forward: bool

    def block(self, place: int, first: int) -> int:
        ahead = (place - self.cut) // self.period
        return first + ahead if self.is_forward else first - 1 - ahead

    def blocks(self, first: int) -> range:
        ends = [self.block(place, first) for place in (self.low, self.high - 1)]
        return range(min(ends), max(ends) + 1)

    def at(self, block: int, first: int) -> int:
        """Where the nodes of a block start."""
        ahead = block - first if self.is_forward else first - 1 - block
        return self.cut + ahead * self.period


@dataclass(slots=True)
class ShortJoint:
    """A traced joint graph whose runs can be made longer."""

    joint: GraphModule
    num_forward_outputs: int
    own: Own
    first: int
    runs: Sequence[BlockRun]
    nodes: list[Node] = field(init=False)
    regions: list[RepeatedPart] = field(init=False)
    places: dict[Node, Place] = field(init=False)
    kinds: dict[Node, list[Any]] = field(init=False)
    """Of nodes in regions: how each leaf of their arguments differs from block to block."""
    owners: dict[int, tuple[Node, int]] = field(init=False)
    """By address of a storage: which node's result it belongs to first, and which of its tensors."""

    def __post_init__(self) -> None:
        self.nodes = [node for node in self.joint.graph.nodes if node.op not in ("placeholder", "output")]
        self.regions = list(self._find_regions())
        self.places = dict(self._places())
        self.kinds = {}
        for region in self.regions:
            kinds = self._kinds(region, self.first - 2)
            for block in self._alike(region, kinds):
                self.kinds |= zip(self._row(region, block), kinds or (), strict=True)
        self.owners = {}
        for node in self.joint.graph.nodes:
            for number, tensor in enumerate(tensors_in(node.meta.get("val"))):
                self.owners.setdefault(storage_address(tensor), (node, number))

    def _places(self) -> Iterator[tuple[Node, Place]]:
        for number, region in enumerate(self.regions):
            for place, node in enumerate(self.nodes[region.low : region.high], region.low):
                yield node, (number, region.block(place, self.first), (place - region.cut) % region.period)

    def _row(self, region: RepeatedPart, block: int) -> list[Node]:
        start = region.at(block, self.first)
        return self.nodes[start : start + region.period]

    def output(self) -> Node:
        return next(iter(self.joint.graph.find_nodes(op="output")))

    def inputs(self) -> list[Node]:
        return [node for node in self.joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]

    def node_at(self, region: int, block: int, place: int) -> Node:
        start = self.regions[region].at(block, self.first)
        if not self.regions[region].low <= start < self.regions[region].high:
            raise NotAlike("a block reads what does not repeat")
        return self.nodes[start + place]

    def is_next(self, one: Node, other: Node) -> bool:
        """Whether `other` is in its block what `one` is in the block before."""
        for known in (self.places, self.own):
            if one in known and other in known:
                (run, *places), (other_run, *others) = known[one], known[other]
                block = places.pop(0 if known is self.places else 1)
                return (
                    run == other_run and block + 1 == others.pop(0 if known is self.places else 1) and places == others
                )
        return False

    def _find_regions(self) -> Iterator[RepeatedPart]:
        split = next((place for place, node in enumerate(self.nodes) if _reads_tangent(node)), len(self.nodes))
        tokens = [_token(node) for node in self.nodes]
        starts: dict[tuple[bool, int, int, int], int] = {}
        for place, node in enumerate(self.nodes):
            run, part, block = (node.meta.get("custom") or {}).get(LABEL, (-1, -1, -1))
            if run >= 0:
                starts.setdefault((place < split, run, part, block), place)
        for is_forward, low, high in ((True, 0, split), (False, split, len(self.nodes))):
            # The gap is before this block in forward, and before the one that follows in backward.
            after, further = (self.first, self.first - 1) if is_forward else (self.first - 1, self.first)
            for run, part in sorted({key[1:3] for key in starts if key[0] == is_forward}):
                cut, before = (starts.get((is_forward, run, part, block), -1) for block in (after, further))
                if cut < 0 or before < 0 or cut <= before:
                    raise NotAlike("blocks of a run are not traced one after the other")
                yield _grown(tokens, run, cut, cut - before, low, high, is_forward)

    def _alike(self, region: RepeatedPart, kinds: list[list[Any]] | None) -> range:
        """The blocks around the gap that read alike; those at the ends may read what does not repeat."""
        blocks, low, high = region.blocks(self.first), self.first - 2, self.first + 1
        if kinds is None or self._kinds(region, self.first - 1) != kinds:
            raise NotAlike("blocks around the gap read different things")
        while low - 1 in blocks and self._kinds(region, low - 1) == kinds:
            low -= 1
        while high in blocks and self._kinds(region, high - 1) == kinds:
            high += 1
        if high < self.first + 2:
            raise NotAlike("too few blocks read alike after the gap")
        return range(low, high)

    def _kinds(self, region: RepeatedPart, block: int) -> list[list[Any]] | None:
        """How each leaf of the arguments of a block's nodes differs in the next block; None where another way."""
        gap = len(self.runs[region.run].left_out(self.first)) if block == self.first - 1 else 0
        found: list[list[Any]] = []
        for one, other in zip(self._row(region, block), self._row(region, block + 1), strict=True):
            pairs = zip(leaves((one.args, one.kwargs)), leaves((other.args, other.kwargs)), strict=True)
            found.append([self._kind(before, after, gap) for before, after in pairs])
            if None in found[-1]:
                return None
        return found

    def _kind(self, before: Any, after: Any, gap: int) -> Any:
        if type(before) is int and type(after) is int:
            growth = (after - before) / (gap + 1)
            return int(growth) if growth == int(growth) else None
        if before is after or not (isinstance(before, Node) or before != after):
            return _SAME
        if isinstance(before, Node) and isinstance(after, Node) and self.is_next(before, after):
            return _SHIFT if before in self.places else _OWN
        return None


def _grown(
    tokens: Sequence[Any], run: int, cut: int, period: int, least: int, most: int, is_forward: bool
) -> RepeatedPart:
    """The whole blocks around the gap that look alike."""
    low, high = cut - period, cut
    while low - period >= least and tokens[low - period : low] == tokens[cut - period : cut]:
        low -= period
    while high + period <= most and tokens[high : high + period] == tokens[cut - period : cut]:
        high += period
    if low > cut - 2 * period or high < cut + 2 * period:
        raise NotAlike("too few blocks look alike around the gap")
    return RepeatedPart(run, low, cut, high, period, is_forward)


def _token(node: Node) -> Any:
    return node.op, node.target, skeleton((node.args, node.kwargs)), described(node.meta.get("val"))


def _reads_tangent(node: Node) -> bool:
    return any(is_tangent(item) for item in node.all_input_nodes)


class LongJoint:
    """Writes the long graph."""

    def __init__(
        self,
        short: ShortJoint,
        gaps: Sequence[int],
        graph: Graph,
        inputs: Mapping[Node, Node],
        own: Callable[..., Node],
    ) -> None:
        """`gaps` are the blocks that are missing of each run; `inputs` are those of the short graph in the long one;
        `own(run, slot, block)` is that of any block, numbered without a gap.
        """
        self._short, self._gaps, self._graph, self._own = short, gaps, graph, own
        self._made: dict[Node, Node] = dict(inputs)
        self._added: dict[tuple[int, int], list[Node]] = {}
        """By region and block, counted from the gap on."""

    def write(self) -> None:
        """All nodes but inputs and output."""
        cuts = {region.cut: number for number, region in enumerate(self._short.regions)}
        for place, node in enumerate(self._short.nodes):
            if place in cuts:
                self._fill(cuts[place])
            self._made[node] = self._copy(node)

    def made(self, item: Any) -> Any:
        """What stands for something of the short graph."""
        return self._made.get(item, item) if isinstance(item, Node) else item

    def of_missing(self, last: Any, before: Any, block: int) -> Any:
        """What belongs to a missing block, numbered without a gap, given what belongs to the two before the gap."""
        first, places = self._short.first, self._short.places
        if last is None and before is None:
            return None
        if last not in places or before not in places:
            raise NotAlike("what a block is to return is not its own")
        region, read, place = places[last]
        if places[before] != (region, read - 1, place):
            raise NotAlike("what blocks are to return is not theirs in the same way")
        return self._at(region, read + block - (first - 1), place)

    def _at(self, region: int, block: int, place: int) -> Node:
        """A node in the long graph, whose blocks are numbered without a gap."""
        first, gap = self._short.first, self._gaps[self._short.regions[region].run]
        if first <= block < first + gap:
            return self._added[region, block][place]
        return self._made[self._short.node_at(region, block if block < first else block - gap, place)]

    def _copy(self, node: Node) -> Node:
        """A traced node, which reads missing blocks where those are its neighbours now."""
        kinds = iter(self._short.kinds.get(node, ()))
        number, block, _ = self._short.places.get(node, (-1, 0, 0))
        is_after = node in self._short.kinds and block >= self._short.first
        ahead = self._gaps[self._short.regions[number].run] if is_after else 0

        def change(item: Any) -> Any:
            kind = next(kinds, _SAME)
            if not isinstance(item, Node):
                return item
            return self._neighbour(item, ahead) if kind == _SHIFT else self._made[item]

        args, kwargs = map_aggregate((node.args, node.kwargs), change)
        made = add_node(self._graph, node.op, node.target, args, kwargs, node.name)
        set_field(made, "meta", self._moved(node, ahead) if node in self._short.kinds else node.meta)
        return made

    def _neighbour(self, item: Node, ahead: int) -> Node:
        region, block, place = self._short.places[item]
        return self._at(region, block + ahead, place)

    def _moved(self, node: Node, ahead: int) -> dict[str, Any]:
        """What is known of a traced node, whose result may be a view of a missing block's now."""
        tensors = tensors_in(node.meta.get("val"))
        for tensor in tensors:
            owner, number = self._short.owners[storage_address(tensor)]
            there = self._neighbour(owner, ahead) if owner in self._short.places and owner is not node else None
            if there is not None and there is not self._made[owner]:
                if len(tensors) > 1 or not isinstance(node.meta["val"], torch.Tensor):
                    raise NotAlike("several results are views of another block's")
                storage = tensors_in(there.meta["val"])[number].untyped_storage()
                return {**node.meta, "val": FakeLike(tensor).made(storage, tensor.storage_offset())}
        return node.meta

    def _fill(self, number: int) -> None:
        """Write the missing blocks of a region."""
        region = self._short.regions[number]
        first = self._short.first
        start = region.at(first - 1, first)
        templates = [_Template(self._short, node) for node in self._short.nodes[start : start + region.period]]
        missing = range(first, first + self._gaps[region.run])
        for block in missing if region.is_forward else reversed(missing):
            row = self._added[number, block] = []
            for template in templates:
                row.append(self._add(template, block - (first - 1)))

    def _add(self, template: _Template, ahead: int) -> Node:
        """A copy of a node of the last block before the gap, so many blocks further on."""
        node, kinds = template.node, iter(self._short.kinds[template.node])

        def change(item: Any) -> Any:
            kind = next(kinds)
            if kind in (_SHIFT, _OWN):
                return self._further(item, ahead)
            if kind == _SAME:
                return self._made[item] if isinstance(item, Node) else item
            return item + kind * ahead

        args, kwargs = map_aggregate((node.args, node.kwargs), change)
        made = add_node(self._graph, node.op, node.target, args, kwargs, node.name)
        set_field(made, "meta", {**node.meta, "val": self._value(template, ahead), **template.modules(ahead)})
        return made

    def _further(self, item: Node, ahead: int) -> Node:
        """What stands so many blocks further on where a traced node stands."""
        if item in self._short.places:
            region, block, place = self._short.places[item]
            return self._at(region, block + ahead, place)
        run, slot, block = self._short.own[item]
        return self._own(run, slot, block + ahead)

    def _value(self, template: _Template, ahead: int) -> Any:
        """What tracing would have found for the copy."""
        val, tensors = template.node.meta.get("val"), list[torch.Tensor]()
        for owner, number, moves, growth, like in template.storages:
            if owner is template.node:
                storage = tensors[number].untyped_storage() if number < len(tensors) else None
            else:
                there = self._further(owner, ahead) if moves else self._made[owner]
                storage = tensors_in(there.meta["val"])[number].untyped_storage()
            tensors.append(like.made(storage, like.offset + growth * ahead))
        if isinstance(val, torch.Tensor):
            return tensors[0]
        found = iter(tensors)
        if not isinstance(val, (tuple, list)):
            return val
        return type(val)(next(found) if isinstance(item, torch.Tensor) else item for item in val)


class _Template:
    """A node of the last block before a gap, and on what its results lie."""

    __slots__ = ("_blocks", "_stacks", "node", "storages")

    def __init__(self, short: ShortJoint, node: Node) -> None:
        region, block, place = short.places[node]
        other = short.node_at(region, block - 1, place)
        self.node = node
        self._blocks = short.runs[short.regions[region].run].blocks[short.first - 1 :]
        known = [item.meta.get(_MODULES) for item in self._blocks[0]]
        stacks = {key: node.meta[key] for key in (_MODULES, f"fwd_{_MODULES}") if node.meta.get(key)}
        self._stacks = {key: known.index(stack) for key, stack in stacks.items() if stack in known}
        pairs = zip(tensors_in(other.meta.get("val")), tensors_in(node.meta.get("val")), strict=True)
        self.storages = [self._storage(short, one, two) for one, two in pairs]

    def modules(self, ahead: int) -> dict[str, Any]:
        """In which modules the copy so many blocks further on is computed."""
        return {key: self._blocks[ahead][place].meta.get(_MODULES) for key, place in self._stacks.items()}

    def _storage(
        self, short: ShortJoint, before: torch.Tensor, tensor: torch.Tensor
    ) -> tuple[Node, int, bool, int, FakeLike]:
        """Whose storage a result lies on, which of its tensors', whether that is another in each block, by how much the
        offset there grows from block to block, and what it is like.
        """
        (one, number), (other, same) = (short.owners[storage_address(item)] for item in (before, tensor))
        if number != same or (one is not other and not short.is_next(one, other)):
            raise NotAlike("results of blocks lie on different storages")
        return other, number, one is not other, tensor.storage_offset() - before.storage_offset(), FakeLike(tensor)


def joint_difference(one: Graph, other: Graph) -> str:
    """What differs in two graphs of the same inputs: in ops, what they read, how results lie, on which storages."""
    left, right = list(one.nodes), list(other.nodes)
    if len(left) != len(right):
        return f"{len(left)} nodes in place of {len(right)}"
    numbers = [{node: number for number, node in enumerate(nodes)} for nodes in (left, right)]
    owners: list[dict[int, tuple[int, int]]] = [{}, {}]
    for pair in zip(left, right, strict=True):
        facts = [_facts(node, known, owned) for node, known, owned in zip(pair, numbers, owners, strict=True)]
        if facts[0] != facts[1]:
            return f"{pair[0].name} is not {pair[1].name}"
    return ""


def _facts(node: Node, numbers: Mapping[Node, int], owners: dict[int, tuple[int, int]]) -> Any:
    read = [numbers[item] if isinstance(item, Node) else repr(item) for item in leaves((node.args, node.kwargs))]
    tensors = tensors_in(node.meta.get("val"))
    own = ((storage_address(tensor), (numbers[node], place)) for place, tensor in enumerate(tensors))
    stored = [owners.setdefault(address, owner) for address, owner in own]
    layouts = [(described(item), item.storage_offset(), item.untyped_storage().nbytes()) for item in tensors]
    target = node.target if node.op != "placeholder" else node.op
    return node.op, target, skeleton((node.args, node.kwargs)), read, stored, layouts
