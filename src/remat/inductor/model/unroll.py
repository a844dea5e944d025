"""A schedule that makes a value again more than once, as a joint graph in which each time is a node of its own.

In: a `Joint`, its contracted graph and a schedule of that. Out: an `Unrolled`: the same joint graph with copies of
forward nodes that backward runs a second time or later, the reads of backward turned to the copy that is there then,
and what is saved. The first time a value is made again is the node itself, which torch's partitioner moves to the
backward; ops that draw random numbers are never copied, as only the node itself replays its generator. What is computed
inside the kernel of a copy is copied with it where Inductor would otherwise compute it once for both, in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.core.schedule import Schedule
from remat.inductor.model.contract import Contracted
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.program import MOST_OPS, MOST_READS, MeasuredRates


@dataclass(frozen=True, slots=True)
class Copy:
    """A node that runs once more."""

    original: int
    reads: tuple[int, ...]
    """In place of the original's, one by one."""
    before: int
    """The node of backward that it runs for."""


@dataclass(frozen=True, slots=True)
class Unrolled:
    joint: Joint
    """Copies stand at the end, in order."""
    saved: frozenset[int]
    copies: tuple[Copy, ...]
    turned: tuple[tuple[int, int, int], ...]
    """(node of backward, what it read, what it reads instead)."""


def unroll(joint: Joint, contracted: Contracted, schedule: Schedule) -> Unrolled:
    """See the module's docstring."""
    backward = contracted.cut(schedule)
    work = _Work(joint, set(contracted.node_of), backward.saved | joint.kept)
    for step in backward.steps:
        number = contracted.op_of[step]
        if joint.nodes[number].phase is Half.BACKWARD:
            work.run(number)
        else:
            work.run_again(number)
    return work.finish()


class _Work:
    def __init__(self, joint: Joint, values: set[int], saved: frozenset[int]) -> None:
        self.joint, self.values, self.saved = joint, values, saved
        self.now: dict[int, int] = {}
        """For each value of the forward, the node that holds it; itself where nothing is said."""
        self.copies: list[Copy] = []
        self.turned: list[tuple[int, int, int]] = []
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}
        self._ran: set[int] = set()
        """Nodes of the forward that run again as themselves, and nodes of backward that have run."""
        self._unplaced = 0

    def run(self, number: int) -> None:
        """A node of backward: it and what is computed inside its kernel read what is there now."""
        stack = [number]
        while stack:
            item = stack.pop()
            if item in self._ran or self.joint.nodes[item].kind is Kind.INPUT:
                continue
            self._ran.add(item)
            for read in dict.fromkeys(self.joint.nodes[item].reads):
                if self.joint.nodes[read].phase is Half.BACKWARD:
                    if read not in self.values:
                        stack.append(read)
                elif (found := self.here(read)) != read:
                    self.turned.append((item, read, found))
        self._place(number)

    def run_again(self, number: int) -> None:
        """An op of the forward runs in backward."""
        node = self.joint.nodes[number]
        parts = [item for item in self.joint.readers[number] if self.joint.nodes[item].is_part]
        results = parts or [number]
        reads = tuple(self.here(read) for read in node.reads)
        is_first = number not in self._ran and not self.saved & set(results)
        if node.draws or (is_first and reads == node.reads):
            self._ran.add(number)
            self.now.update((item, item) for item in results)
            return
        made = self._copy(number, self._within_its_kernel(node.reads))
        if parts:
            self.now.update((part, self._copy(part, (made,))) for part in parts)
        else:
            self.now[number] = made

    def here(self, number: int) -> int:
        """The node that holds what `number` is, at this time."""
        node = self.joint.nodes[number]
        if node.phase is Half.BACKWARD or node.kind is Kind.INPUT:
            return number
        if number in self.values:
            return self.now.get(number, number)
        reads = tuple(self.here(read) for read in node.reads)
        if reads == node.reads or node.draws:
            return number
        key = number, reads
        if key not in self._known:
            self._known[key] = self._copy(number, reads)
        return self._known[key]

    def _within_its_kernel(self, reads: Sequence[int]) -> tuple[int, ...]:
        """What a copy reads: the values that are there now, and copies of its own of what leads to it from them."""
        inside, values = self._inside(reads)
        if len(values) <= MOST_READS and len(inside) < MOST_OPS:
            return tuple(self.here(read) for read in reads)
        own: dict[int, int] = {}

        def found(read: int) -> int:
            return own[read] if read in own else self.here(read)

        for number in inside:
            own[number] = self._copy(number, tuple(map(found, self.joint.nodes[number].reads)))
        return tuple(map(found, reads))

    def _inside(self, reads: Sequence[int]) -> tuple[list[int], set[int]]:
        """What is computed between values and these, in order, and the values."""
        inside, values, waiting = set[int](), set[int](), list(reads)
        while waiting:
            number = waiting.pop()
            node = self.joint.nodes[number]
            is_inside = node.kind in (Kind.FUSED, Kind.VIEW) and node.phase is not Half.BACKWARD and not node.draws
            if number in self.values or not is_inside:
                values.add(node.owner)
            elif number not in inside:
                inside.add(number)
                waiting.extend(node.reads)
        return sorted(inside), values

    def _copy(self, number: int, reads: tuple[int, ...]) -> int:
        self.copies.append(Copy(number, reads, -1))
        return len(self.joint.nodes) + len(self.copies) - 1

    def _place(self, number: int) -> None:
        """Copies made since the last node of backward run for this one."""
        for index in range(self._unplaced, len(self.copies)):
            self.copies[index] = replace(self.copies[index], before=number)
        self._unplaced = len(self.copies)

    def finish(self) -> Unrolled:
        # What was made again after the last node of backward serves nobody.
        copies = self.copies[: self._unplaced]
        nodes = list(self.joint.nodes)
        for number, old, new in self.turned:
            nodes[number] = _turned(nodes[number], old, new)
        for copy in copies:
            nodes.append(_copied(nodes, copy))
        joint = Joint(tuple(nodes), self.joint.forward_outputs, self.joint.gradients, self.joint.kept)
        return Unrolled(joint, self.saved, tuple(copies), tuple(self.turned))


def copied_rates(rates: MeasuredRates, unrolled: Unrolled, count: int) -> MeasuredRates:
    """What kernels cost, copies included; `count` is how many nodes there were before."""
    alone, spaces = dict(rates.alone_ns), dict(rates.workspace_bytes)
    for number, copy in enumerate(unrolled.copies, start=count):
        original = copy.original
        if original in rates.alone_ns:
            alone[number] = rates.alone_ns[original]
        if original in rates.workspace_bytes:
            spaces[number] = rates.workspace_bytes[original]
    return replace(rates, alone_ns=alone, workspace_bytes=spaces)


def _turned(node: JointNode, old: int, new: int) -> JointNode:
    return replace(node, reads=tuple(new if read == old else read for read in node.reads))


def _copied(nodes: Sequence[JointNode], copy: Copy) -> JointNode:
    original, number = nodes[copy.original], len(nodes)
    owner = nodes[copy.reads[0]].owner if original.kind is Kind.VIEW else number
    return replace(original, name=f"{original.name}_again_{number}", phase=Half.FREE, reads=copy.reads, owner=owner)
