"""One half of a compiled step: what is in memory and when, and what its kernels take.

In: the nodes that it runs, in their order. Neighbouring pointwise ops and row reductions between two kernels that run
alone become one kernel, so their results are in memory only where another kernel, the backward or the caller reads
them; a cheap one that is read again later is computed again there instead, from what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remat.inductor.model.joint import Joint, JointNode, Kind

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


class HalfProgram:
    """Its stages, what is in memory, and when."""

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
        self.summed: set[tuple[int, int]] = set()
        """Storages that are summed up, with the stages of the kernels that do it."""
        self._realise(frozenset())
        scattered = self._scattered()
        if scattered:
            self._realise(scattered)
        if cramped := self._cramped():
            self._realise(scattered | cramped)

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
                    # What is summed up is computed once, whoever reads it.
                    if owner in self._stored or nodes[owner].kind is Kind.SUM:
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
        sums = (number for number in self.program if nodes[number].kind is Kind.SUM)
        self.summed = {(source, self.stage[number]) for number in sums for source in self.sources[number]}

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

    def _cramped(self) -> frozenset[int]:
        """What is computed once for kernels that could be one, if there were room for the results of both at once."""
        apart = {
            number: sinks
            for number in self._stored - self.real
            if len(self._stages_of(sinks := self._sinks(number))) > 1
        }
        if not apart:
            return frozenset()
        live = self.timeline(0)
        place = {number: index for index, number in enumerate(self.program)}
        return frozenset(number for number, sinks in apart.items() if not self._have_room(sinks, place, live))

    def _stages_of(self, numbers: set[int]) -> set[int]:
        return {self.stage[number] for number in numbers}

    def _have_room(self, sinks: set[int], place: Mapping[int, int], live: Sequence[int]) -> bool:
        """Whether all can be computed where the first is, with what they wait for."""
        first, *later = sorted(sinks, key=place.__getitem__)
        for sink in later:
            if self.stage[sink] != self.stage[first]:
                moved, waiting = {sink}, [sink]
                while waiting:
                    for source in self.sources.get(waiting.pop(), ()):
                        if place.get(source, -1) > place[first] and source not in moved:
                            moved.add(source)
                            waiting.append(source)
                size = sum(self.joint.nodes[number].size_bytes for number in moved & self.real)
                if max(live[place[first] : place[sink]]) + size > max(live):
                    return False
        return True

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
        over = self._over()
        last: dict[int, int] = {}
        for number in self.program:
            if (number in self.real or number in self.ends) and not nodes[number].is_part:
                for source in self.sources.get(number, ()):
                    last[source] = max(last.get(source, -1), over[number])
        dying: dict[int, list[int]] = {}
        for number, index in last.items():
            is_ours = (number in self.here and number not in self.ends) or number in self.given
            if is_ours and number not in self.ends:
                dying.setdefault(index, []).append(number)
        live, found = start, []
        written_over: set[int] = set()
        for index, number in enumerate(self.program):
            node = nodes[number]
            made = node.size_bytes if number in self.real else 0
            if made and node.kind is not Kind.ALONE:
                fitting = (item for item in dying.get(over[number], ()) if nodes[item].size_bytes == made)
                item = next((item for item in fitting if item not in written_over and self._yields(item, number)), None)
                if item is not None:
                    written_over.add(item)
                    live -= made
            found.append(live + made + self._workspace(number))
            live += made - sum(nodes[item].size_bytes for item in dying.get(index, ()) if item not in written_over)
            if made and number not in last and number not in self.ends:
                live -= made
        return found

    def _over(self) -> dict[int, int]:
        """The place at which the kernel of each node is over: neighbours that read the same are one, and hold all that
        they read until then.
        """
        nodes, found = self.joint.nodes, dict[int, int]()
        extents = self._extents()
        kernel: list[int] = []
        read: set[int] = set()
        for index, number in enumerate(self.program):
            found[number] = index
            if number not in self.real or nodes[number].is_part:
                continue
            if nodes[number].kind is Kind.ALONE:
                kernel, read = [], set()
                continue
            sources = self.sources[number]
            is_same = kernel and self.stage[kernel[0]] == self.stage[number] and extents[kernel[0]] == extents[number]
            if not is_same or (read.isdisjoint(sources) and sources.isdisjoint(kernel)):
                kernel, read = [], set()
            kernel.append(number)
            read |= sources
            for item in kernel:
                found[item] = index
        return found

    def _yields(self, item: int, number: int) -> bool:
        """Whether the kernel that computes `number` may write over `item`."""
        nodes, stage = self.joint.nodes, self.stage
        if item in self.joint.tangents or nodes[number].concatenates:
            return False
        if any(nodes[reader].moves and stage[reader] == stage[number] for reader in self.readers[item]):
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
