"""A joint graph as a problem for the solvers: only what can be in memory stays a value.

In: a `Joint` and what kernels cost. Out: a `Contracted`. A pointwise result that no kernel of its own reads, and that
is hardly smaller than what it is computed from, never needs memory: whoever reads it computes it again from its
sources, inside its own kernel. What is left are the results of kernels that run alone, their inputs, sums, random
masks, and values such as a residual stream that are read again much later.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.problem import Costs
from remat.core.schedule import Schedule
from remat.inductor.model.joint import Half, Joint, Kind
from remat.inductor.model.program import MeasuredRates, computed_bytes, readers_of, stages_of

SMALLER = 0.95
"""Of the bytes that a pointwise result is computed from: one that is larger is never worth writing and reading back."""


@dataclass(frozen=True, slots=True)
class Contracted:
    graph: Graph
    costs: Costs
    node_of: tuple[int, ...]
    """For each value, the node whose storage it is."""
    op_of: tuple[int, ...]
    """For each op, the node that it is."""
    boundary: int
    """The first op of backward."""

    def cut(self, schedule: Schedule) -> Backward:
        """What backward does under `schedule`.

        A compiled forward runs nothing twice: what the schedule runs again there runs in backward, if that needs it.
        """
        seen: set[OpId] = set()
        late: list[OpId] = []
        for step in schedule.steps:
            if step >= self.boundary or step in seen:
                late.append(step)
            seen.add(step)
        wanted: set[ValueId] = set()
        steps: list[OpId] = []
        for step in reversed(late):
            op = self.graph.ops[step]
            if step >= self.boundary or not wanted.isdisjoint(op.outputs):
                wanted = wanted.difference(op.outputs).union(op.inputs)
                steps.append(step)
        made = {value for op in self.graph.ops[: self.boundary] for value in op.outputs}
        saved = made.intersection(wanted.union(self.graph.outputs))
        return Backward(tuple(reversed(steps)), frozenset(self.node_of[value] for value in saved))

    def schedule(self, saved: frozenset[int]) -> Schedule:
        """What runs where backward takes `saved` from the forward, and makes again what else it needs."""
        maker = {value: OpId(number) for number, op in enumerate(self.graph.ops) for value in op.outputs}
        there = {value for value, node in enumerate(self.node_of) if node in saved}
        steps = [OpId(number) for number in range(self.boundary)]
        for number in range(self.boundary, len(self.graph.ops)):
            stack = [OpId(number)]
            while stack:
                waiting = [maker[value] for value in self.graph.ops[stack[-1]].inputs if value not in there]
                if waiting:
                    stack.extend(waiting)
                    continue
                step = stack.pop()
                if not there.issuperset(self.graph.ops[step].outputs) or step == number:
                    steps.append(step)
                    there.update(self.graph.ops[step].outputs)
        return Schedule(tuple(steps))


@dataclass(frozen=True, slots=True)
class Backward:
    steps: tuple[OpId, ...]
    """Its own ops, and ops of the forward that run again."""
    saved: frozenset[int]
    """Nodes whose results it takes from the forward."""


def contract(joint: Joint, rates: MeasuredRates) -> Contracted:
    """See the module's docstring."""
    order = _order(joint)
    real, sources = _values(joint, order)
    value_of: dict[int, ValueId] = {}
    ops: list[Op] = []
    times: list[float] = []
    spaces: list[int] = []
    numbers: list[int] = []
    boundary = -1
    for number in order:
        node = joint.nodes[number]
        results = [item for item in _results(joint, number) if item in real]
        if node.kind in (Kind.INPUT, Kind.VIEW) or node.is_part or not results:
            continue
        if node.phase is Half.BACKWARD and boundary < 0:
            boundary = len(ops)
        inputs = tuple(value_of[source] for source in sorted(sources[number]) if source in value_of)
        for item in results:
            value_of[item] = ValueId(len(value_of))
        can_run = node.recomputable and not joint.kept & set(results)
        outputs = tuple(value_of[item] for item in results)
        is_late = boundary >= 0
        ops.append(Op(node.name, inputs, outputs, is_late, can_run, node.target, node.module))
        numbers.append(number)
        spaces.append(rates.workspace_bytes.get(number, 0))
        times.append(_time_ns(joint, number, results, sources[number], rates))
    held = sorted(
        value_of[number] for number in joint.forward_outputs | joint.gradients | joint.kept if number in value_of
    )
    sizes = tuple(joint.nodes[number].size_bytes for number in value_of)
    graph = Graph(tuple(ops), len(value_of), tuple(held))
    return Contracted(graph, Costs(tuple(times), tuple(spaces), sizes), tuple(value_of), tuple(numbers), boundary)


def _order(joint: Joint) -> list[int]:
    """As in the graph, but what has to be saved belongs to the forward, with all it needs.

    What only backward needs and is larger than what it is made from waits until somebody reads it.
    """
    early: set[int] = set()
    waiting = list(joint.kept)
    while waiting:
        number = waiting.pop()
        if number not in early and joint.nodes[number].phase is not Half.BACKWARD:
            early.add(number)
            waiting.extend(joint.nodes[number].reads)
    forward = [number for number, node in enumerate(joint.nodes) if node.phase is Half.FORWARD or number in early]
    is_forward = set(forward)
    rest = [number for number in range(len(joint.nodes)) if number not in is_forward]
    return forward + _lazily(joint, rest, {number for number in rest if _grows(joint, number)})


def _grows(joint: Joint, number: int) -> bool:
    """Whether what only backward needs, or a view of that, takes more memory than what it is made from."""
    if joint.nodes[number].phase is not Half.FREE:
        return False
    node = joint.nodes[joint.nodes[number].owner]
    if node.phase is not Half.FREE or node.draws or not node.recomputable:
        return False
    found: set[int] = set()
    waiting = list(node.reads)
    while waiting:
        item = joint.nodes[waiting.pop()].owner
        if joint.nodes[item].phase is Half.FREE and joint.nodes[item].kind is not Kind.INPUT:
            waiting.extend(joint.nodes[item].reads)
        else:
            found.add(item)
    return node.size_bytes >= sum(joint.nodes[item].size_bytes for item in found)


def _lazily(joint: Joint, order: list[int], late: set[int]) -> list[int]:
    """The same order, but each of `late` just before the first that reads it."""
    done: dict[int, None] = {}
    for number in order:
        if number in late:
            continue
        stack = [number]
        while stack:
            waiting = [read for read in joint.nodes[stack[-1]].reads if read in late and read not in done]
            if waiting:
                stack.extend(waiting)
            else:
                done.setdefault(stack.pop())
    return [*done, *(number for number in order if number not in done)]


def _values(joint: Joint, order: list[int]) -> tuple[set[int], dict[int, frozenset[int]]]:
    """Nodes that stay values, and for every node the values that computing it reads."""
    nodes = joint.nodes
    real: set[int] = set()
    sources: dict[int, frozenset[int]] = {}
    readers = readers_of(joint, order)
    stage = stages_of(joint, order)
    ends = joint.forward_outputs | joint.gradients | joint.kept
    for number in order:
        node = nodes[number]
        if node.kind in (Kind.VIEW, Kind.INPUT):
            continue
        found: set[int] = set()
        for owner in dict.fromkeys(nodes[read].owner for read in node.reads):
            if owner in real:
                found.add(owner)
            elif not node.is_part:
                found |= sources.get(owner, frozenset())
        if node.is_part:
            found = set(sources[node.reads[0]])
        sources[number] = frozenset(found)
        if _stays(joint, number, readers, stage, sources[number], ends):
            real.add(number)
    return real, sources


def _stays(
    joint: Joint,
    number: int,
    readers: dict[int, list[int]],
    stage: dict[int, int],
    sources: frozenset[int],
    ends: frozenset[int],
) -> bool:
    node = joint.nodes[number]
    if not node.size_bytes:
        return False
    if number in ends or node.kind is not Kind.FUSED:
        return True
    mine = readers.get(number, ())
    if node.in_pieces or any(joint.nodes[reader].reads_memory for reader in mine):
        return True
    if not any(stage[reader] != stage[number] or _crosses(joint, number, reader) for reader in mine):
        return False
    if not node.recomputable or node.is_random or _is_mask(joint, number):
        return _is_mask(joint, number) or not node.recomputable
    return bool(sources) and node.size_bytes <= SMALLER * sum(joint.nodes[source].size_bytes for source in sources)


def _is_mask(joint: Joint, number: int) -> bool:
    """What was drawn at random, at its smallest: one byte for each element."""
    node = joint.nodes[number]
    if node.size_bytes != node.elements:
        return False
    seen: set[int] = set()
    waiting = [number]
    while waiting:
        item = waiting.pop()
        if item in seen or joint.nodes[item].kind is not Kind.FUSED:
            continue
        seen.add(item)
        if joint.nodes[item].is_random:
            return True
        waiting.extend(joint.nodes[read].owner for read in joint.nodes[item].reads)
    return False


def _crosses(joint: Joint, number: int, reader: int) -> bool:
    return joint.nodes[number].phase is not Half.BACKWARD and joint.nodes[reader].phase is Half.BACKWARD


def _results(joint: Joint, number: int) -> list[int]:
    parts = [reader for reader in joint.readers[number] if joint.nodes[reader].is_part]
    return parts or [number]


def _time_ns(joint: Joint, number: int, results: list[int], sources: frozenset[int], rates: MeasuredRates) -> float:
    node = joint.nodes[number]
    if node.kind is Kind.ALONE:
        return rates.alone_ns.get(number, rates.kernel_ns)
    if _is_mask(joint, number):
        return rates.factor(node) * rates.random_bytes * node.elements / rates.bytes_per_ns
    written = sum(joint.nodes[item].size_bytes for item in results)
    read = sum(joint.nodes[item].size_bytes for item in sources)
    moved = written + read + computed_bytes(joint, number, rates)
    return rates.kernel_ns + rates.factor(node) * moved / rates.bytes_per_ns
