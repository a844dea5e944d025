"""What compiled code will need for a choice of saved values: its memory over the step and its time.

In: a `Joint`, the nodes whose results are saved, what kernels cost. Out: a `Prediction`. The backward runs what it
needs again just before its first use. Neighbouring pointwise ops and row reductions between two kernels that run alone
become one kernel, so their results are in memory only where another kernel, the backward or the caller reads them; a
cheap one that is read again later is computed again there instead, from what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.split import split

MOST_READS = 4
"""A pointwise result with several readers stays out of memory while computing it reads no more than this."""
MOST_OPS = 30
FAR_APART = 8
"""Kernels that run alone between two others: Inductor makes one of two that are nearer, where nothing else forbids."""


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What kernels cost on one device."""

    bytes_per_ns: float
    kernel_ns: float
    """Of starting a fused kernel."""
    alone_ns: Mapping[int, float]
    """For each node that runs alone, its measured time."""
    workspace_bytes: Mapping[int, int] = field(default_factory=dict)
    """For each node that runs alone, what it needs while it runs."""
    random_bytes: float = 2.0
    """What drawing a random number takes inside a kernel, in bytes that could be moved meanwhile."""
    slow_bytes: float = 0.0
    """The same for a function such as tanh."""
    summed_bytes: float = 0.0
    """The same for each element that a sum over rows goes through."""
    stores_heavy: bool = False
    """Whether what takes long to compute is stored where it has several readers, as on the CPU."""
    sums_in_place: bool = True
    """Whether a kernel may write into what it also sums up, as on the CPU; on CUDA it reads that in two ways."""
    between_ns: float = 0.0
    """What a kernel that was timed by itself waits for the one before it in a step."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By `JointNode.work`: by how much fused kernels that do this were seen to be dearer."""

    def factor(self, node: JointNode) -> float:
        return self.factors.get(node.work, 1.0)


class Moment(NamedTuple):
    """One node of the joint graph as it runs."""

    node: int
    in_backward: bool
    at: int
    """In backward, the node of the joint graph's backward that this one runs for; itself in forward."""
    live_bytes: int
    time_ns: float
    """Of a kernel that computes several, all of it is at the last."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes beyond what is there when the step begins."""

    moments: tuple[Moment, ...]
    time_ns: float
    alone_ns: float
    """Of this, what kernels that run alone take."""
    saved_bytes: int
    in_memory: frozenset[int]
    """Nodes of the backward that are run again and whose results are in memory for a while."""

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.live_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.live_bytes


def predict(joint: Joint, saved: frozenset[int], rates: MeasuredRates) -> Prediction:
    """See the module's docstring."""
    halves = split(joint, saved)
    kept = {joint.nodes[number].owner for number in saved}
    kept = {number for number in kept if joint.nodes[number].kind is not Kind.INPUT}
    forward = _Half(joint, halves.forward, frozenset(kept) | joint.forward_outputs, frozenset(), rates)
    backward = _Half(joint, halves.backward, joint.gradients, frozenset(kept | joint.tangents), rates)
    copied = sum(node.size_bytes for node in joint.nodes if node.is_copied)
    first = zip(halves.forward, forward.timeline(copied), forward.times_ns(), strict=True)
    after = copied + sum(joint.nodes[number].size_bytes for number in kept | joint.forward_outputs | joint.tangents)
    second = zip(halves.backward, halves.runs_for, backward.timeline(after), backward.times_ns(), strict=True)
    moments = [Moment(node, False, node, live, time_ns) for node, live, time_ns in first]
    moments += [Moment(node, True, at, live, time_ns) for node, at, live, time_ns in second]
    again = frozenset(
        number
        for number in halves.backward
        if joint.nodes[number].phase is not Half.BACKWARD and number in backward.real
    )
    time_ns = sum(moment.time_ns for moment in moments)
    alone_ns = sum(moment.time_ns for moment in moments if joint.nodes[moment.node].kind is Kind.ALONE)
    return Prediction(tuple(moments), time_ns, alone_ns, sum(joint.nodes[number].size_bytes for number in kept), again)


def readers_of(joint: Joint, program: Sequence[int]) -> dict[int, list[int]]:
    """For each storage, the nodes of a program that read it, through views."""
    found: dict[int, list[int]] = {}
    for number in program:
        node = joint.nodes[number]
        if node.kind is not Kind.VIEW and not node.is_part:
            for owner in joint.owners[number]:
                found.setdefault(owner, []).append(number)
    return found


def stages_of(joint: Joint, program: Sequence[int]) -> dict[int, int]:
    """For each node of a program, how many kernels that run alone, or reductions over columns, come before it."""
    nodes = joint.nodes
    stage: dict[int, int] = {}
    for number in program:
        node = nodes[number]
        if node.is_part:
            stage[number] = stage[node.reads[0]]
            continue
        is_apart = node.kind is Kind.ALONE
        latest = 0
        for owner in joint.owners[number]:
            if owner in stage:
                latest = max(latest, stage[owner] + (is_apart or _ends_kernel(joint, owner)))
        stage[number] = latest
    return stage


def _ends_kernel(joint: Joint, number: int) -> bool:
    """Whether nothing that reads this node can be in its kernel."""
    return joint.nodes[number].kind is Kind.ALONE or _sums_columns(joint, number)


def _sums_columns(joint: Joint, number: int) -> bool:
    """Whether this is a sum that a kernel of its own makes piece by piece."""
    return joint.nodes[number].kind is Kind.SUM and not joint.nodes[joint.maker(number)].sums_rows


def computed_bytes(joint: Joint, number: int, rates: MeasuredRates) -> float:
    """What computing a fused node takes besides reading and writing, in bytes that could be moved meanwhile."""
    node = joint.nodes[number]
    found = rates.random_bytes * node.elements if node.is_random else 0.0
    if node.is_slow:
        found += rates.slow_bytes * node.elements
    if node.sums_rows:
        found += rates.summed_bytes * sum(joint.nodes[owner].elements for owner in joint.owners[number])
    return found


class _Half:
    """One compiled program: its stages, what is in memory, and when."""

    def __init__(
        self, joint: Joint, program: Sequence[int], ends: frozenset[int], given: frozenset[int], rates: MeasuredRates
    ) -> None:
        self.joint, self.program, self.ends, self.given, self.rates = joint, program, ends, given, rates
        self.here = set(program)
        self.readers = readers_of(joint, program)
        self.stage = stages_of(joint, program)
        self.sources: dict[int, frozenset[int]] = {}
        """For each node, the storages that computing it reads from memory."""
        self.real: set[int] = set()
        """Nodes whose results are in memory."""
        self._stored: set[int] = set()
        """Nodes that Inductor computes once and not in each of their readers."""
        self._realise(frozenset())
        if scattered := self._scattered():
            self._realise(scattered)
        sums = (number for number in program if joint.nodes[number].kind is Kind.SUM)
        self.summed = {(source, self.stage[number]) for number in sums for source in self.sources[number]}
        """Storages that are summed up, with the stages of the kernels that do it."""

    def _realise(self, scattered: frozenset[int]) -> None:
        """Find what is in memory; `scattered` are known to be."""
        self.real.clear()
        self._stored.clear()
        nodes = self.joint.nodes
        # How much computing a node reads, where what is computed once is read and not computed.
        counted: dict[int, frozenset[int]] = {}
        # Each op that draws random numbers reads a seed of its own from one storage.
        drawn: dict[int, frozenset[int]] = {}
        ops: dict[int, int] = {}
        heavy: set[int] = set()
        for number in self.program:
            node = nodes[number]
            if node.kind is Kind.VIEW:
                continue
            if node.is_part:
                self.sources[number] = self.sources.get(node.reads[0], frozenset())
                if self._is_real_sum(number) if node.kind is Kind.SUM else True:
                    self.real.add(number)
                continue
            sources: set[int] = set()
            reads: set[int] = set()
            randoms = {number} if node.is_random else set()
            count = 1
            if node.is_heavy:
                heavy.add(number)
            for owner in self.joint.owners[number]:
                if owner in self.here and owner not in self.real:
                    sources |= self.sources.get(owner, frozenset())
                    if owner in self._stored:
                        reads |= self._pieces(number, owner)
                        continue
                    reads |= counted.get(owner, frozenset())
                    randoms |= drawn.get(owner, frozenset())
                    count += ops.get(owner, 0)
                    if owner in heavy:
                        heavy.add(number)
                elif nodes[owner].size_bytes or nodes[owner].kind is Kind.INPUT:
                    sources.add(owner)
                    reads |= self._pieces(number, owner)
            self.sources[number], counted[number] = frozenset(sources), frozenset(reads)
            ops[number], drawn[number] = count, frozenset(randoms)
            if node.kind is Kind.ALONE or number in self.ends or number in scattered:
                self.real.add(number)
            elif node.kind is Kind.SUM:
                if self._is_real_sum(number):
                    self.real.add(number)
            elif self._is_real(number, len(reads) + max(0, len(randoms) - 1), count, number in heavy):
                self.real.add(number)

    def _pieces(self, number: int, owner: int) -> set[int]:
        """The parts of a storage that a node reads, as Inductor counts them; the storage itself where it reads all."""
        return {self._piece(read) for read in self.joint.nodes[number].reads if self.joint.nodes[read].owner == owner}

    def _piece(self, read: int) -> int:
        found, nodes = self.joint.nodes[read].owner, self.joint.nodes
        while nodes[read].kind is Kind.VIEW:
            if nodes[read].elements < nodes[nodes[read].reads[0]].elements:
                found = read
            read = nodes[read].reads[0]
        return found

    def _is_real_sum(self, number: int) -> bool:
        readers = self.readers.get(number, ())
        return number in self.ends or any(self._apart(number, reader) for reader in readers)

    def _apart(self, number: int, reader: int) -> bool:
        node = self.joint.nodes[reader]
        scatters = node.in_pieces and not node.concatenates
        return node.kind is Kind.ALONE or scatters or self.stage[reader] != self.stage[number]

    def _is_real(self, number: int, reads: int, ops: int, is_heavy: bool) -> bool:
        node = self.joint.nodes[number]
        if not node.size_bytes:
            return False
        readers = self.readers.get(number, ())
        if node.in_pieces or any(self.joint.nodes[reader].reads_memory for reader in readers):
            return True
        far = [reader for reader in readers if self.stage[reader] != self.stage[number]]
        is_stored = reads > MOST_READS or ops > MOST_OPS or (is_heavy and self.rates.stores_heavy)
        if node.is_random or (len(readers) > 1 and is_stored):
            self._stored.add(number)
        return bool(far) and len(readers) > 1 and is_stored

    def _scattered(self) -> frozenset[int]:
        """What is computed once and not yet taken to be in memory, although several kernels read it."""
        place, count = {}, 0
        for number in self.program:
            place[number] = count
            count += self.joint.nodes[number].kind is Kind.ALONE
        found = set()
        for number in self._stored - self.real:
            sinks = self._sinks(number)
            places = [place[sink] for sink in sinks]
            is_apart = any(_sums_columns(self.joint, sink) for sink in sinks)
            if places and (is_apart or max(places) - min(places) > FAR_APART or self._wait_for_each_other(sinks)):
                found.add(number)
        return frozenset(found)

    def _wait_for_each_other(self, sinks: set[int]) -> bool:
        """Whether one of these can only run when the kernel of another is over."""
        latest = max(self.stage[sink] for sink in sinks)
        waiting = [sink for sink in sinks if self.stage[sink] < latest]
        ends, seen = sinks.difference(waiting), set(waiting)
        while waiting:
            # What an op returns in parts, and views of it, are read in its name.
            for reader in self.joint.readers[waiting.pop()]:
                if reader in ends:
                    return True
                if reader in self.here and reader not in seen and self.stage[reader] <= latest:
                    seen.add(reader)
                    waiting.append(reader)
        return False

    def _sinks(self, number: int) -> set[int]:
        """Nodes in memory whose kernels compute with what `number` is."""
        found: set[int] = set()
        seen, waiting = {number}, [number]
        while waiting:
            for reader in self.readers.get(waiting.pop(), ()):
                if reader in self.real:
                    found.add(reader)
                elif reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        return found

    def timeline(self, start: int) -> list[int]:
        """Bytes in memory while each node of the program runs."""
        nodes = self.joint.nodes
        place = {number: index for index, number in enumerate(self.program)}
        last: dict[int, int] = {}
        for number in self.program:
            if (number in self.real or number in self.ends) and not nodes[number].is_part:
                for source in self.sources.get(number, ()):
                    last[source] = max(last.get(source, -1), place[number])
        dying: dict[int, list[int]] = {}
        for number, index in last.items():
            is_ours = (number in self.here and number not in self.ends) or number in self.given
            if is_ours and number not in self.ends:
                dying.setdefault(index, []).append(number)
        live, found = start, []
        for index, number in enumerate(self.program):
            node = nodes[number]
            made = node.size_bytes if number in self.real else 0
            ends = dying.get(index, ())
            reused = 0
            if made and node.kind is not Kind.ALONE:
                fitting = (item for item in ends if nodes[item].size_bytes == made)
                reused = made if any(self._yields(item, number) for item in fitting) else 0
            found.append(live + made - reused + self._workspace(number))
            live += made - sum(nodes[item].size_bytes for item in ends)
            if made and number not in last and number not in self.ends:
                live -= made
        return found

    def _yields(self, item: int, number: int) -> bool:
        """Whether the kernel that computes `number` may write over `item`."""
        if item in self.joint.tangents or self.joint.nodes[number].concatenates:
            return False
        return self.rates.sums_in_place or (item, self.stage[number]) not in self.summed

    def _workspace(self, number: int) -> int:
        """What a node needs while it runs; the results of an op that returns several are nodes that follow it."""
        parts = 0 if self.joint.nodes[number].in_place else self.joint.parts_bytes[number]
        return self.rates.workspace_bytes.get(number, 0) + parts

    def times_ns(self) -> list[float]:
        """Of each node of the program: of what runs alone by measurement, of the others by what their kernels read,
        write and compute.
        """
        nodes, rates = self.joint.nodes, self.rates
        found = dict.fromkeys(self.program, 0.0)
        kernels: dict[tuple[int, int], tuple[set[int], list[int]]] = {}
        extents = self._extents()
        for number in self.program:
            node = nodes[number]
            if node.kind is Kind.ALONE:
                found[number] = rates.alone_ns.get(number, 0.0)
                continue
            if node.kind is Kind.VIEW or node.is_part:
                continue
            found[number] = rates.factor(node) * computed_bytes(self.joint, number, rates) / rates.bytes_per_ns
            if number in self.real:
                reads, writes = kernels.setdefault((self.stage[number], extents[number]), (set(), []))
                reads |= self.sources[number]
                writes.append(number)
        for reads, writes in kernels.values():
            found[writes[-1]] += rates.kernel_ns + self._moved_bytes(reads, set(writes)) / rates.bytes_per_ns
        return [found[number] for number in self.program]

    def _moved_bytes(self, reads: set[int], writes: set[int]) -> float:
        """By one kernel, in bytes of kernels that cost what they were thought to."""
        nodes, factor = self.joint.nodes, self.rates.factor
        written = sum(nodes[number].size_bytes for number in writes)
        scaled = sum(factor(nodes[number]) * nodes[number].size_bytes for number in writes)
        read = sum(nodes[number].size_bytes or self._input_bytes(number) for number in reads - writes)
        return scaled * (1 + read / written) if written else float(read)

    def _extents(self) -> dict[int, int]:
        """Over how many elements the kernel of each node runs; those of one stage and extent become one.

        What is computed of a row's sum alone, as an inverse deviation, is part of the kernel that sums up the row.
        """
        nodes, found, of_rows = self.joint.nodes, dict[int, int](), set[int]()
        for number in self.program:
            node = nodes[number]
            if node.sums_rows:
                of_rows.add(number)
            sums = [read for read in self.joint.owners[number] if self._is_of_row(read, number, of_rows)]
            if sums and node.kind is Kind.FUSED and all(node.elements <= nodes[read].elements for read in sums):
                of_rows.add(number)
            read = (found[read] if read in sums else nodes[read].elements for read in self.joint.owners[number])
            found[number] = max([node.elements, *read])
        return found

    def _is_of_row(self, read: int, number: int, of_rows: set[int]) -> bool:
        is_of_row = read in of_rows or self.joint.maker(read) in of_rows
        return is_of_row and self.stage[read] == self.stage[number]

    def _input_bytes(self, number: int) -> int:
        return self.joint.nodes[number].elements * 4
