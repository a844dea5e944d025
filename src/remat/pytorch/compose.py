"""Several captured graphs of one step become one problem, and its schedule becomes one schedule for each of them.

In: the calls of a step in the order of their forwards (backwards run in reverse). Out: a `Step` whose graph lists

    forward 1, return 1, forward 2, return 2, backward 2, resume 1, backward 1

so that all of them share one budget. `return k` stands for what the caller does after forward k, `resume k` hands in
the gradients of its outputs; the last call does both at once. A gradient that backward 2 passes straight to backward 1
is one value, not two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.problem import Costs
from remat.core.schedule import Schedule
from remat.pytorch.capture import Captured


@dataclass(frozen=True, slots=True)
class Call:
    """One forward-and-backward of a captured graph inside the step."""

    captured: Captured
    costs: Costs
    outside_bytes: int = 0
    """The most that the caller needs between this forward and what follows, beyond what graphs hold."""
    retained_bytes: int = 0
    """The part of `outside_bytes` that stays until the step ends."""
    passed_gradients: tuple[tuple[int, int, int], ...] = ()
    """(tangent, call, gradient): tangent number `tangent` is gradient number `gradient` of a later call."""


@dataclass(frozen=True, slots=True)
class Step:
    """The combined graph and, for each call, where its ops went."""

    calls: tuple[Call, ...]
    graph: Graph
    costs: Costs
    placed: tuple[tuple[OpId, ...], ...]
    """For each call, the combined op of each of its ops; its boundary is where gradients come in."""
    returns: tuple[OpId, ...]
    """For each call but the last, the op at which its forward ends."""

    def tidy(self, schedule: Schedule) -> Schedule:
        """The same schedule with every op inside a program that can run it.

        A recomputation that was placed while a later call runs waits until its own backward starts: it only serves
        ops there. This can change the peak where a step has several calls.
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
        return Schedule(tuple(steps))

    def split(self, schedule: Schedule) -> tuple[Schedule, ...]:
        """Each call's own part of a tidy schedule."""
        parts: list[list[OpId]] = [[] for _ in self.calls]
        local = [{place: OpId(number) for number, place in enumerate(places)} for places in self.placed]
        owner = self._owners()
        for place in schedule.steps:
            if place in owner:
                parts[owner[place]].append(local[owner[place]][place])
        return tuple(Schedule(tuple(part)) for part in parts)

    def _owners(self) -> dict[OpId, int]:
        return {place: call for call, places in enumerate(self.placed) for place in places}


def compose(calls: Sequence[Call], name: str = "") -> Step:
    """One graph for all `calls`."""
    builder = _Builder(list(calls))
    for number in range(len(calls)):
        builder.add_forward(number)
    for number in reversed(range(len(calls))):
        builder.add_backward(number)
    return builder.finish(name)


@dataclass(slots=True)
class _Builder:
    calls: list[Call]
    ops: list[Op] = field(default_factory=list)
    time_ns: list[float] = field(default_factory=list)
    workspace: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    values: list[dict[int, ValueId]] = field(default_factory=list)
    placed: list[dict[int, OpId]] = field(default_factory=list)
    returns: list[OpId] = field(default_factory=list)
    retained: list[ValueId] = field(default_factory=list)
    """What the caller keeps: values without a graph."""
    consumed: set[ValueId] = field(default_factory=set)
    """Gradients that an earlier call's backward takes over: they do not live to the end."""

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
        else:
            self.returns.append(OpId(len(self.ops)))
        # The caller's bytes include the gradients it hands in, which are values of their own here.
        handed_in = sum(self.sizes[value] for value in outputs)
        retained = max(0, self.calls[number].retained_bytes - handed_in)
        workspace = max(0, self.calls[number].outside_bytes - handed_in - retained)
        if retained:
            self.retained.append(ValueId(len(self.sizes)))
            self.sizes.append(retained)
            outputs = (*outputs, self.retained[-1])
        self._append(Op(f"return {number}", inputs, outputs, recomputable=False), 0.0, workspace)

    def add_backward(self, number: int) -> None:
        captured = self.calls[number].captured
        if number < len(self.calls) - 1:
            self._link_gradients(number)
            boundary = captured.graph.ops[captured.boundary]
            fresh = [value for value in boundary.outputs if value not in self.values[number]]
            self.placed[number][captured.boundary] = OpId(len(self.ops))
            outputs = tuple(self._new_value(number, value) for value in fresh)
            self._append(Op(f"resume {number}", (), outputs, backward=True, recomputable=False), 0.0, 0)
        for local in range(captured.boundary + 1, len(captured.graph.ops)):
            self._add(number, local)

    def _link_gradients(self, number: int) -> None:
        captured = self.calls[number].captured
        tangents = captured.tangents()
        for tangent, call, gradient in self.calls[number].passed_gradients:
            source = self.calls[call].captured
            value = source.base.get(source.backward_outputs[gradient])
            local = captured.base.get(tangents[tangent])
            if value is not None and local is not None:
                self.values[number][local] = self.values[call][value]
                self.consumed.add(self.values[call][value])

    def _add(self, number: int, local: int) -> None:
        call, op = self.calls[number], self.calls[number].captured.graph.ops[local]
        inputs = tuple(dict.fromkeys(self.values[number][value] for value in op.inputs))
        self.placed[number][local] = OpId(len(self.ops))
        outputs = tuple(self._new_value(number, value) for value in op.outputs)
        combined = Op(op.name, inputs, outputs, op.backward, op.recomputable, op.target, op.module)
        self._append(combined, call.costs.time_ns[local], call.costs.workspace_bytes[local])

    def _new_value(self, number: int, value: ValueId) -> ValueId:
        combined = ValueId(len(self.sizes))
        self.sizes.append(self.calls[number].costs.size_bytes[value])
        self.values[number][value] = combined
        return combined

    def _append(self, op: Op, time_ns: float, workspace: int) -> None:
        self.ops.append(op)
        self.time_ns.append(time_ns)
        self.workspace.append(workspace)

    def finish(self, name: str) -> Step:
        outputs = [
            self.values[number][value]
            for number, call in enumerate(self.calls)
            for value in call.captured.graph.outputs
            if self.values[number][value] not in self.consumed
        ]
        placed = tuple(
            tuple(places[local] for local in range(len(call.captured.graph.ops)))
            for call, places in zip(self.calls, self.placed, strict=True)
        )
        graph = Graph(tuple(self.ops), len(self.sizes), tuple(dict.fromkeys((*outputs, *self.retained))), name)
        costs = Costs(tuple(self.time_ns), tuple(self.workspace), tuple(self.sizes))
        return Step(tuple(self.calls), graph, costs, placed, tuple(self.returns))
