"""The hook into Inductor: a choice of saved values becomes the cut between its forward and its backward.

In: the joint graph that Inductor hands to its partitioner. Out: two graphs. Nodes are marked as saved or as run again,
and torch's own partitioner cuts where the marks say: it keeps mutations in the forward and replays the generator for
random ops that run again. What has no mark is left to it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch.fx import GraphModule, Node

from remat.inductor._compat.compiling import (
    CustomPartitioner,
    CutPolicy,
    min_cut,
    replaying_only,
    runs_alone,
    saved_by_min_cut,
    sort_nodes,
    without_repeats,
)
from remat.inductor._compat.kernels import NUMBER
from remat.inductor.joining import Rooms
from remat.inductor.loss.marks import mark_saved
from remat.inductor.model.joint import Half, Joint, Kind, image_of, read_joint
from remat.inductor.model.split import split
from remat.inductor.model.unroll import Unrolled
from remat.inductor.passes.expanded import settle_expanded
from remat.inductor.passes.late_casts import put_off_casts
from remat.inductor.passes.pads import pad_once
from remat.inductor.passes.places import keep_places
from remat.inductor.passes.scatter import scatter_into_terms
from remat.inductor.passes.settle import settle_sums
from remat.inductor.shapes.open_inputs import at_largest, leave_open_again
from remat.inductor.travel import Travel
from remat.pytorch._compat.symbols import Symbols
from remat.pytorch.graph.nodes import ancestors, draws, is_view, may_run_twice, mutated_inputs, tensors_in


@dataclass(frozen=True, slots=True)
class Uncut:
    """A joint graph that waits to be cut."""

    joint: Joint
    nodes: tuple[Node, ...]
    """Of the graph that `joint` was read from, by the same numbers."""
    module: GraphModule
    inputs: Sequence[object]
    options: Mapping[str, Any]

    def saved_by_torch(self) -> frozenset[int]:
        """What torch.compile would save by itself."""
        # Constants are shared: inside the fake mode of compilation they cannot be copied.
        module = GraphModule(self.module, copy.deepcopy(self.module.graph))
        leave_open_again(module.graph)
        number_of = {node.name: number for number, node in enumerate(self.joint.nodes)}
        # By a mark, not by name: torch gives the name of a node of backward to one that it adds to forward.
        for node in module.graph.nodes:
            node.meta[NUMBER] = number_of.get(node.name)
        found = (item.meta.get(NUMBER) for item in saved_by_min_cut(module, self.inputs, **self.options))
        return frozenset(
            number for number in found if number is not None and self.joint.nodes[number].kind is not Kind.INPUT
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """What to save, and what backward makes again more than once."""

    saved: frozenset[int]
    unrolled: Unrolled | None = None
    rooms: Rooms | None = None
    """Where kernels may become one; wherever Inductor likes, if nothing is said."""


ROOM_SHARE = 0.005
"""Of the room for kernels that become one: what differs by less is compiled once."""


class Instead(Enum):
    """Where no cut is chosen."""

    TORCHS_CUT = "torch's own cut"
    NOTHING = "nothing is to be compiled"


Decide = Callable[[Uncut], Cut | Instead]


class Partitioner(CustomPartitioner):
    """Asks `decide` once for each joint graph.

    Inductor takes two halves from here and nothing else: where nothing is to be compiled it gets torch's, and whoever
    compiles them has to look at `is_wanted`.
    """

    def __init__(
        self, decide: Decide, travel: Travel | None = None, symbols: Symbols | None = None, *, casts_late: bool = False
    ) -> None:
        self._decide, self._travel = decide, travel
        self._symbols = symbols
        """For sizes that are left open."""
        self._casts_late = casts_late
        """Whether gradients are cast when backward is over."""
        self._hash = ""
        self.is_wanted = True
        """Whether the halves are to be compiled."""
        self.is_torchs = False
        """Whether the cut was left to torch."""
        self.rooms: Rooms | None = None
        """See `Cut`."""
        self.away_bytes = 0
        """Of what is saved, what spends a while on the host."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        pad_once(gm)
        without_repeats(gm)
        with at_largest(gm.graph, self._symbols):
            self._mark(gm, joint_inputs, options)
        with replaying_only(draws) if not self.is_torchs else contextlib.nullcontext():
            halves: tuple[GraphModule, GraphModule] = min_cut(gm, joint_inputs, **options)
        if self.is_wanted and not self.is_torchs:
            for half in halves:
                keep_places(half)
        if self._travel is not None and self.is_wanted:
            self.away_bytes = self._travel.apply(*halves, options["num_fwd_outputs"])
        return halves

    def _mark(self, gm: GraphModule, joint_inputs: Sequence[object], options: Mapping[str, Any]) -> None:
        """Write into the graph what was decided."""
        scatter_into_terms(gm)
        settle_sums(gm)
        settle_expanded(gm)
        if self._casts_late:
            put_off_casts(gm, options["num_fwd_outputs"])
        kept = frozenset((*mark_saved(gm), *mark_stale(gm, options["num_fwd_outputs"]), *_prepared_images(gm)))
        joint = read_joint(gm, options["num_fwd_outputs"], kept)
        uncut = Uncut(joint, tuple(node for node in gm.graph.nodes if node.op != "output"), gm, joint_inputs, options)
        decision = self._decide(uncut)
        self.is_wanted, self.is_torchs = decision is not Instead.NOTHING, decision is Instead.TORCHS_CUT
        if isinstance(decision, Cut):
            self._hash, self.rooms = _hash(joint, decision), decision.rooms
            apply(uncut, decision)

    def uuid(self) -> Any:
        """Part of the key under which Inductor keeps its code, which is not all up to the graph."""
        return f"remat {self._hash} {_sources()}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Inductor writes its settings, and with them this object, into the same key."""
        return str, (self.uuid(),)


def mark_stale(module: GraphModule, num_forward_outputs: int) -> list[Node]:
    """What backward needs and is made from inputs that the forward writes to: marked as saved, for a second run would
    read what was written. Torch's own cut can be one that does.
    """
    mutated = mutated_inputs(module.graph)
    needed = ancestors(module.graph.output_node().args[0][num_forward_outputs:])
    found = [
        node
        for node in module.graph.nodes
        if node in needed
        and not mutated.isdisjoint(node.all_input_nodes)
        and not is_view(node)
        and not may_run_twice(node, mutated)
    ]
    for node in found:
        node.meta["recompute"] = CutPolicy.MUST_SAVE
    return found


def _prepared_images(module: GraphModule) -> list[Node]:
    """Inputs as convolutions' gradients read them, cast or padded: were they made again, Inductor would save copies of
    the inputs, laid out for convolutions and larger."""
    images = (image_of(node) for node in module.graph.nodes)
    return [image for image in images if image is not None and _is_prepared(image)]


def _is_prepared(image: Node) -> bool:
    source = image
    while source.op == "call_function" and len(source.all_input_nodes) == 1 and not runs_alone(source):
        source = source.all_input_nodes[0]
    is_made_of_input = source is not image and source.op == "placeholder"
    return is_made_of_input and _size(image) <= _size(source)


def _size(node: Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta.get("val")))


def apply(uncut: Uncut, cut: Cut) -> None:
    """Write into the graph what is saved, what runs again, and copies of what runs again more than once."""
    if cut.unrolled is None:
        _mark_all(uncut.joint, uncut.nodes, cut.saved)
        return
    _mark_all(cut.unrolled.joint, _copied(uncut, cut.unrolled), cut.saved)
    sort_nodes(uncut.module.graph)
    uncut.module.recompile()


def _mark_all(joint: Joint, nodes: Sequence[Node], saved: frozenset[int]) -> None:
    for number, node in enumerate(nodes):
        node.meta[NUMBER] = number
    mark(joint, nodes, saved)


def _copied(uncut: Uncut, unrolled: Unrolled) -> list[Node]:
    """The nodes of the graph with copies at the end, as in `unrolled.joint`."""
    nodes = list(uncut.nodes)
    for copy_ in unrolled.copies:
        original = nodes[copy_.original]
        olds = [nodes[read] for read in uncut.joint.nodes[copy_.original].reads]
        turned = dict(zip(olds, (nodes[read] for read in copy_.reads), strict=True))
        with uncut.module.graph.inserting_before(nodes[copy_.before]):
            made = uncut.module.graph.node_copy(original, lambda node, turned=turned: turned.get(node, node))
        made.meta.pop("partitioner_tag", None)
        nodes.append(made)
    for number, old, new in unrolled.turned:
        nodes[number].replace_input_with(nodes[old], nodes[new])
    _put_before_readers(nodes[len(uncut.nodes) :], uncut.module)
    return nodes


def _put_before_readers(made: Sequence[Node], module: GraphModule) -> None:
    """Right before who reads it first, as what runs again once is put by torch's partitioner, and as is predicted. What
    nobody reads would have others made early; it goes.
    """
    place: dict[Node, float] = {node: number for number, node in enumerate(module.graph.nodes)}
    for node in reversed(made):
        if not node.users:
            module.graph.erase_node(node)
            continue
        first = min(node.users, key=lambda reader: place[reader])
        first.prepend(node)
        place[node] = place[first]


def mark(joint: Joint, nodes: Sequence[Node], saved: frozenset[int]) -> None:
    """Write into the graph what is saved and what runs again."""
    for node in nodes:
        node.meta.pop("recompute", None)
    backward = split(joint, saved).backward
    seen_as = _seen_as(joint, backward, saved)
    unneeded = {view for number, end in seen_as.items() for view in _between(joint, number, end)}
    for number in backward:
        node = joint.nodes[number]
        if node.reads and number not in saved and number not in unneeded and node.phase is not Half.BACKWARD:
            nodes[number].meta["recompute"] = CutPolicy.MUST_RECOMPUTE
    for number in saved:
        # Torch forbids no view to run again: what it is a view of may not either, and of the two the view is saved.
        for item in {number, joint.maker(number), seen_as.get(number, number)}:
            if nodes[item].meta.get("recompute") is None and nodes[item].op == "call_function":
                nodes[item].meta["recompute"] = CutPolicy.MUST_SAVE


def _seen_as(joint: Joint, backward: Sequence[int], saved: frozenset[int]) -> dict[int, int]:
    """For each saved value of which backward reads one view only, that view: it is what has to be saved.

    Inductor lays out what a forward returns as the graph says, and images as convolutions like them: an activation of
    four dimensions that a matmul reads as a matrix would be turned round twice.
    """
    readers: dict[int, set[int]] = {number: set() for number in saved}
    for number in backward:
        if joint.nodes[number].kind is not Kind.VIEW:
            for read in joint.nodes[number].reads:
                readers.get(joint.nodes[read].owner, set()).add(read)
    ends = {number: next(iter(found)) for number, found in readers.items() if len(found) == 1}
    return {number: end for number, end in ends.items() if end != number}


def _between(joint: Joint, number: int, end: int) -> Iterator[int]:
    """The views that lead from a value to the last of them."""
    while end != number:
        yield end
        end = joint.nodes[end].reads[0]


@functools.cache
def _sources() -> str:
    """Of what tells Inductor how to write code: another version of Remat must not be given this one's."""
    folder = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:24]


def _hash(joint: Joint, cut: Cut) -> str:
    names = sorted(joint.nodes[number].name for number in cut.saved)
    copies = cut.unrolled.copies if cut.unrolled is not None else ()
    # Which kernels become one is up to what there is room for, which varies a little from run to run.
    room = round(math.log(max(cut.rooms.backward.most_bytes, 1)) / ROOM_SHARE) if cut.rooms is not None else None
    return hashlib.sha256(repr((names, copies, room)).encode()).hexdigest()[:24]
