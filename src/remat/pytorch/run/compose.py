"""Several captured graphs of one step become one problem, and its schedule becomes one schedule for each of them.

In: the calls of a step in the order of their forwards (backwards run in reverse). Out: a `Step` whose graph lists

    forward 1, return 1, forward 2, return 2, backward 2, resume 1, backward 1

so that all of them share one budget. `return k` stands for what the caller does after forward k, `resume k` hands in
the gradients of its outputs; the last call does both at once, and `end` stands for what follows the last backward.
These ops are the *gaps*, counted from 0; where there are several calls, `begin` comes before them. A storage that goes
from one graph to another is one value; it lives as long as a graph reads it or the caller was seen to hold it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from remat.core.copies import OPS_PER_VALUE, copies_of
from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.problem import Costs
from remat.core.schedule import Schedule
from remat.pytorch.graph.capture import Captured, resident_roots
from remat.pytorch.graph.moved import can_move, with_moves
from remat.pytorch.run.gradients.hand_over import delayed, readers_of_handed

BEFORE = -1
"""The gap before the first graph."""
Source = tuple[int, ValueId]
"""A call and one of its values."""


@dataclass(frozen=True, slots=True)
class Call:
    """One forward-and-backward of a captured graph inside the step."""

    captured: Captured
    costs: Costs
    passed_gradients: tuple[tuple[int, int, ValueId], ...] = ()
    """(tangent, call, value): tangent number `tangent` is a value of another call, mostly a gradient of a later one."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A storage that the caller holds for a while or hands from one graph to another."""

    size_bytes: int
    born: int
    """The gap in which the caller made it; where a graph made it, the gap that follows."""
    held: int
    """The last gap in which it was in memory."""
    source: Source | None = None
    """None where the caller made it."""
    inputs: tuple[tuple[int, int], ...] = ()
    """(call, number of the input) where a graph takes it."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What the caller holds and needs while no graph runs. What is not known lives to the end of the step."""

    passed: tuple[Passed, ...] = ()
    workspace_bytes: tuple[int, ...] = ()
    """For each gap, what the caller needs there for a while."""
    most_bytes: tuple[int, ...] = ()
    """For each gap that was measured, the most that there was in it besides what graphs keep."""


@dataclass(frozen=True, slots=True)
class Step:
    """The combined graph and, for each call, where its ops went."""

    calls: tuple[Call, ...]
    graph: Graph
    costs: Costs
    placed: tuple[tuple[OpId, ...], ...]
    """For each call, the combined op of each of its ops; its boundary is where gradients come in."""
    gaps: tuple[OpId, ...]
    """The op of each gap; `end` is there only if something happens in it."""

    @property
    def returns(self) -> tuple[OpId, ...]:
        """For each call but the last, the op at which its forward ends."""
        return self.gaps[: len(self.calls) - 1]

    def join(self, parts: Sequence[Schedule]) -> Schedule:
        """One schedule from each call's own; the opposite of `split`."""
        steps = [OpId(0)] if len(parts) > 1 else []
        cuts = [part.steps.index(call.captured.boundary) for part, call in zip(parts, self.calls, strict=True)]
        for part, cut, places, gap in zip(parts, cuts, self.placed, self.gaps, strict=False):
            steps += [*(places[local] for local in part.steps[:cut]), gap]
        for number in reversed(range(len(parts))):
            # The last call's boundary is its return, which is there already.
            start = cuts[number] + (number == len(parts) - 1)
            steps += [self.placed[number][local] for local in parts[number].steps[start:]]
        return Schedule((*steps, *self.gaps[2 * len(parts) - 1 :]))

    def tidy(self, schedule: Schedule) -> Schedule:
        """The same schedule with every op inside a program that can run it.

        A recomputation that was placed while a later call runs waits until its own backward starts: it only serves
        ops there. A gradient is handed over when nothing reads its parameter any more. This can change the peak.
        """
        windows = [(places[call.captured.boundary], call) for places, call in zip(self.placed, self.calls, strict=True)]
        waiting: dict[OpId, list[OpId]] = {resume: [] for resume, _ in windows}
        owner = self._owners()
        returned: set[int] = set()
        steps: list[OpId] = []
        for place in schedule.steps:
            call = owner.get(place, -1)
            if call in returned and place != windows[call][0]:
                waiting[windows[call][0]].append(place)
                continue
            steps.append(place)
            if place in self.returns:
                returned.add(self.returns.index(place))
            if place in waiting:
                returned.discard(call)
                steps.extend(waiting.pop(place))
        return Schedule(delayed(steps, self._readers()))

    @property
    def is_tidied(self) -> bool:
        """Whether a schedule may have to be changed so that the programs can run it."""
        return len(self.calls) > 1 or bool(self._readers())

    def _readers(self) -> dict[OpId, frozenset[OpId]]:
        """For each op that hands over a gradient, those that it waits for."""
        return {
            places[op]: frozenset(places[reader] for reader in readers)
            for call, places in zip(self.calls, self.placed, strict=True)
            for op, readers in readers_of_handed(call.captured).items()
        }

    def split(self, schedule: Schedule) -> tuple[Schedule, ...]:
        """Each call's own part of a tidy schedule."""
        return tuple(part for _, part in self.split_moved(self.graph, schedule))

    def split_moved(self, graph: Graph, schedule: Schedule) -> tuple[tuple[Captured, Schedule], ...]:
        """The same of a schedule of `graph`, which may have ops that move values: these, too, belong to calls."""
        parts: list[list[OpId]] = [[] for _ in self.calls]
        moved: list[list[ValueId]] = [[] for _ in self.calls]
        local = {place: (call, OpId(op)) for call, places in enumerate(self.placed) for op, place in enumerate(places)}
        for value, copies in copies_of(graph).items():
            call, own = self._home(value)
            first = len(self.placed[call]) + OPS_PER_VALUE * len(moved[call])
            moved[call].append(own)
            for number, place in enumerate((copies.out, copies.gone, copies.back), start=first):
                local[place] = call, OpId(number)
        for place in schedule.steps:
            if place in local:
                call, op = local[place]
                parts[call].append(op)
        return tuple(
            (with_moves(call.captured, values), Schedule(tuple(part)))
            for call, values, part in zip(self.calls, moved, parts, strict=True)
        )

    def _home(self, value: ValueId) -> tuple[int, ValueId]:
        """The call whose op makes a value, and its number there."""
        producer = self.graph.producers()[value]
        call = self._owners()[producer]
        op = self.calls[call].captured.graph.ops[self.placed[call].index(producer)]
        return call, op.outputs[self.graph.ops[producer].outputs.index(value)]

    def can_move(self) -> list[ValueId]:
        """Values that may leave the device for a while: of a step of one call, in which nobody else holds them."""
        if len(self.calls) > 1:
            return []
        captured = self.calls[0].captured
        held = {*self.graph.outputs, *(value for gap in self.gaps for value in self.graph.ops[gap].inputs)}
        makers = captured.graph.producers()
        found = []
        for value in can_move(captured):
            maker = captured.graph.ops[makers[value]]
            place = self.graph.ops[self.placed[0][makers[value]]]
            found.append(place.outputs[maker.outputs.index(value)])
        return [value for value in found if value not in held]

    def nodes(self) -> dict[OpId, Node | None]:
        """The FX node that each op of a call runs."""
        return {
            place: call.captured.op_nodes[local]
            for call, places in zip(self.calls, self.placed, strict=True)
            for local, place in enumerate(places)
        }

    def own(self, call: int, ops: Collection[OpId]) -> frozenset[OpId]:
        """Of ops of the whole, those of one call, by its own numbers."""
        return frozenset(OpId(local) for local, place in enumerate(self.placed[call]) if place in ops)

    def _owners(self) -> dict[OpId, int]:
        return {place: call for call, places in enumerate(self.placed) for place in places}


def compose(calls: Sequence[Call], outside: Outside | None = None, name: str = "") -> Step:
    """One graph for all `calls`."""
    builder = _Builder(list(calls), outside or Outside())
    if len(calls) > 1:
        builder.add_gap("your code before the first graph", BEFORE)
    for number in range(len(calls)):
        builder.add_forward(number)
    for number in reversed(range(len(calls))):
        builder.add_backward(number)
    return builder.finish(name)


@dataclass(slots=True)
class _Builder:
    calls: list[Call]
    outside: Outside
    ops: list[Op] = field(default_factory=list)
    time_ns: list[float] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    values: list[dict[int, ValueId]] = field(default_factory=list)
    placed: list[dict[int, OpId]] = field(default_factory=list)
    gaps: list[OpId] = field(default_factory=list)
    made: dict[int, ValueId] = field(default_factory=dict)
    """Values that the caller makes, by their place in `outside.passed`."""
    read: list[dict[Node, int]] = field(default_factory=list)
    """For each call, the place in `outside.passed` of what an input brings."""
    ending: set[tuple[int, int]] = field(default_factory=set)
    """(call, value) of what does not live to the end, though its graph returns it; another graph may read it."""

    def __post_init__(self) -> None:
        for passed in self.outside.passed:
            if passed.source is not None and passed.held < self._last_gap:
                self.ending.add(passed.source)
        self.ending.update((source, value) for call in self.calls for _, source, value in call.passed_gradients)
        nodes = [call.captured.inputs() for call in self.calls]
        self.read.extend({} for _ in self.calls)
        for place, passed in enumerate(self.outside.passed):
            for call, number in passed.inputs:
                self.read[call][nodes[call][number]] = place

    @property
    def _last_gap(self) -> int:
        return 2 * len(self.calls) - 1

    def add_forward(self, number: int) -> None:
        captured = self.calls[number].captured
        self.values.append({})
        self.placed.append({})
        for local in range(captured.boundary):
            self._add(number, local)
        boundary = captured.graph.ops[captured.boundary]
        inputs = tuple(self.values[number][value] for value in boundary.inputs)
        outputs: tuple[ValueId, ...] = ()
        if number == len(self.calls) - 1:
            self.placed[number][captured.boundary] = OpId(len(self.ops))
            outputs = tuple(self._new_value(number, value) for value in boundary.outputs)
        self.add_gap(f"your code after graph {number + 1}", len(self.gaps), inputs, outputs)

    def add_backward(self, number: int) -> None:
        captured = self.calls[number].captured
        if number < len(self.calls) - 1:
            self._link_gradients(number)
            boundary = captured.graph.ops[captured.boundary]
            fresh = [value for value in boundary.outputs if value not in self.values[number]]
            self.placed[number][captured.boundary] = OpId(len(self.ops))
            outputs = tuple(self._new_value(number, value) for value in fresh)
            self.add_gap(f"your code before the backward of graph {number + 1}", len(self.gaps), (), outputs)
        for local in range(captured.boundary + 1, len(captured.graph.ops)):
            self._add(number, local)

    def add_gap(self, name: str, gap: int, inputs: Sequence[ValueId] = (), outputs: Sequence[ValueId] = ()) -> None:
        """An op that stands for the caller: it reads what was seen in memory then, and makes what appeared."""
        if gap != BEFORE:
            self.gaps.append(OpId(len(self.ops)))
        here = [place for place, item in enumerate(self.outside.passed) if item.source is None and item.born == gap]
        for place in here:
            self.made[place] = self._add_value(self.outside.passed[place].size_bytes)
        held = [place for place, item in enumerate(self.outside.passed) if item.held == gap and place not in here]
        op = Op(
            name,
            tuple(dict.fromkeys((*inputs, *map(self._value_of, held)))),
            (*outputs, *map(self._value_of, here)),
            backward=gap >= len(self.calls),
            recomputable=False,
        )
        has_workspace = gap != BEFORE and self.outside.workspace_bytes
        self._append(op, 0.0, self.outside.workspace_bytes[gap] if has_workspace else 0)

    def _value_of(self, place: int) -> ValueId:
        source = self.outside.passed[place].source
        return self.made[place] if source is None else self.values[source[0]][source[1]]

    def _link_gradients(self, number: int) -> None:
        captured = self.calls[number].captured
        tangents = captured.tangents()
        for tangent, call, value in self.calls[number].passed_gradients:
            local = captured.base.get(tangents[tangent])
            if local is not None:
                self.values[number][local] = self.values[call][value]

    def _add(self, number: int, local: int) -> None:
        call, op = self.calls[number], self.calls[number].captured.graph.ops[local]
        own = (self.values[number][value] for value in op.inputs)
        inputs = tuple(dict.fromkeys((*own, *self._taken(number, local))))
        self.placed[number][local] = OpId(len(self.ops))
        outputs = tuple(self._new_value(number, value) for value in op.outputs)
        recomputable = op.recomputable and not any(self._leaves(number, op, value) for value in op.outputs)
        overwrites = tuple(self.values[number][value] for value in op.overwrites)
        combined = Op(op.name, inputs, outputs, op.backward, recomputable, op.target, op.module, overwrites)
        self._append(combined, call.costs.time_ns[local], call.costs.workspace_bytes[local])

    def _leaves(self, number: int, op: Op, value: ValueId) -> bool:
        """Whether a value is out of its program's reach while the step goes on: there is one version of it."""
        is_gradient = op.backward and value in self.calls[number].captured.graph.outputs
        return (number, value) in self.ending or (is_gradient and number > 0)

    def _taken(self, number: int, local: int) -> Iterator[ValueId]:
        """What an op reads that came into its graph from outside."""
        captured = self.calls[number].captured
        node = captured.op_nodes[local]
        if node is not None and self.read[number]:
            roots = resident_roots(captured, node.all_input_nodes)
            yield from (self._value_of(self.read[number][root]) for root in roots if root in self.read[number])

    def _new_value(self, number: int, value: ValueId) -> ValueId:
        self.values[number][value] = self._add_value(self.calls[number].costs.size_bytes[value])
        return self.values[number][value]

    def _add_value(self, size_bytes: int) -> ValueId:
        self.sizes.append(size_bytes)
        return ValueId(len(self.sizes) - 1)

    def _append(self, op: Op, time_ns: float, workspace: int) -> None:
        self.ops.append(op)
        self.time_ns.append(time_ns)
        self.workspace.append(workspace)

    def finish(self, name: str) -> Step:
        returned = [
            self.values[number][value]
            for number, call in enumerate(self.calls)
            for value in call.captured.graph.outputs
            if (number, value) not in self.ending
        ]
        kept = [value for place, value in self.made.items() if self.outside.passed[place].held >= self._last_gap]
        if self.outside.workspace_bytes:
            self.add_gap("your code after the last backward", self._last_gap)
        placed = tuple(
            tuple(places[local] for local in range(len(call.captured.graph.ops)))
            for call, places in zip(self.calls, self.placed, strict=True)
        )
        graph = Graph(tuple(self.ops), len(self.sizes), tuple(dict.fromkeys((*returned, *kept))), name)
        costs = Costs(tuple(self.time_ns), tuple(self.workspace), tuple(self.sizes))
        return Step(tuple(self.calls), graph, costs, placed, tuple(self.gaps))
