"""The calls of a Keras model as a problem, and schedules that TensorFlow can run.

In: facts and times of calls. Out: a `LayerProblem`: forward of each call, the loss, backward of each call. What a
backward reads of others belongs to the run that it belongs to: where a schedule makes an input of a call again and not
the call, the call is made again too, because its tape knows only what it was run with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule
from remat.keras.layers.call import CallFacts

BACKWARD_TIMES = 2.0
"""A backward is taken for so many forwards; it runs once, whatever is planned."""


@dataclass(frozen=True, slots=True)
class LayerProblem:
    problem: Problem
    call_count: int
    backward_of: dict[int, int]
    """The call whose backward an op is."""
    kept: dict[int, frozenset[int]]
    """Of each backward, the ops whose outputs it reads as its call's latest run saw them."""

    @property
    def loss(self) -> int:
        return self.call_count

    def split(self, schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Before and after the loss."""
        at = schedule.steps.index(OpId(self.loss))
        return tuple(schedule.steps[:at]), tuple(schedule.steps[at + 1 :])

    def repaired(self, schedule: Schedule) -> Schedule:
        """With calls made again whose inputs were made again since."""
        last_run: dict[int, int] = {}
        steps: list[OpId] = []
        for step in schedule.steps:
            call = self.backward_of.get(step)
            if call is not None and any(last_run[other] > last_run[call] for other in self.kept[step] - {call}):
                last_run[call] = len(steps)
                steps.append(OpId(call))
            last_run[step] = len(steps)
            steps.append(step)
        return Schedule(tuple(steps))


@dataclass(slots=True)
class _Builder:
    """Ops and values in the order in which a step computes them."""

    facts: Sequence[CallFacts]
    times_ns: Sequence[float]
    made_by: dict[int, int]
    """The call that makes a tensor."""
    outputs: tuple[int, ...]
    """Calls that make the model's outputs."""
    sizes: list[int] = field(default_factory=list)
    rows: list[tuple[Op, float, int]] = field(default_factory=list)
    made: list[ValueId] = field(default_factory=list)
    """Outputs of each call."""
    inside: list[ValueId] = field(default_factory=list)
    """What the latest run of each call holds for its backward alone."""
    partial: list[list[ValueId]] = field(default_factory=list)
    """Gradients that each call is given."""
    weights: list[ValueId] = field(default_factory=list)

    def value(self, size: int) -> ValueId:
        self.sizes.append(size)
        return ValueId(len(self.sizes) - 1)

    def made_bytes(self, number: int) -> int:
        return self.facts[number].made_bytes

    def calls(self, keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({self.made_by[key] for key in keys if key in self.made_by}))

    def add_forward(self, number: int, own: Set[int]) -> None:
        fact = self.facts[number]
        held = sum(map(self.made_bytes, own)) if fact.has_gradient else 0
        self.made.append(self.value(self.made_bytes(number)))
        self.inside.append(self.value(fact.kept_bytes + held if fact.has_gradient else 0))
        op = Op(
            fact.name,
            tuple(self.made[other] for other in self.calls(fact.reads)),
            (self.made[number], self.inside[number]),
            recomputable=not fact.has_state,
            target="call",
            module=fact.name,
        )
        # What it holds of its inputs is counted with these while it runs.
        self.rows.append((op, self.times_ns[number], fact.forward_workspace - held))

    def add_loss(self) -> None:
        """What Keras computes between forward and backward."""
        self.partial = [[] for _ in self.facts]
        given = tuple(self.value(self.made_bytes(number)) for number in self.outputs)
        for number, gradient in zip(self.outputs, given, strict=True):
            self.partial[number].append(gradient)
        read = tuple(self.made[number] for number in self.outputs)
        self.rows.append((Op("loss", read, given, backward=True, recomputable=False, target="loss"), 0.0, 0))

    def add_backward(self, number: int, own: Set[int]) -> frozenset[int]:
        """Adds the op; the calls whose outputs it reads beside what its call's run holds alone."""
        fact, given = self.facts[number], self.partial[number]
        read = [other for other in self.calls(fact.kept_keys) if other not in own]
        shared = (self.made[other] for other in read)
        gradients = {other: self.value(self.made_bytes(other)) for other in self.calls(fact.reads)}
        self.weights.append(self.value(fact.weight_bytes))
        op = Op(
            f"{fact.name} backward",
            (*given, self.inside[number], *shared),
            (*gradients.values(), self.weights[-1]),
            backward=True,
            recomputable=False,
            target="backward",
            module=fact.name,
        )
        summed = self.made_bytes(number) if len(given) > 1 else 0
        self.rows.append((op, BACKWARD_TIMES * self.times_ns[number], fact.backward_workspace + summed))
        for other, gradient in gradients.items():
            self.partial[other].append(gradient)
        return frozenset(read)

    def problem(self) -> Problem:
        ops, times, workspaces = zip(*self.rows, strict=True)
        results = tuple(self.made[number] for number in self.outputs)
        graph = Graph(ops, len(self.sizes), (*results, *self.weights), "keras")
        return Problem(graph, Costs(times, workspaces, tuple(self.sizes)), 0)


def layer_problem(facts: Sequence[CallFacts], outputs: Sequence[int], times_ns: Sequence[float]) -> LayerProblem:
    """Forward, loss and backward; `outputs` are the keys of the model's outputs."""
    made_by = {key: number for number, fact in enumerate(facts) for key in fact.makes}
    ends = tuple(dict.fromkeys(made_by[key] for key in outputs if key in made_by))
    build = _Builder(facts, times_ns, made_by, ends)
    own = _held_alone(build)
    for number in range(len(facts)):
        build.add_forward(number, own[number])
    build.add_loss()
    backward_of: dict[int, int] = {}
    kept: dict[int, frozenset[int]] = {}
    for number in reversed(range(len(facts))):
        if facts[number].has_gradient and build.partial[number]:
            place = len(build.rows)
            backward_of[place], kept[place] = number, build.add_backward(number, own[number])
    return LayerProblem(build.problem(), len(facts), backward_of, kept)


def _held_alone(build: _Builder) -> list[set[int]]:
    """Of each call, those before it whose outputs no other backward and no later call reads: its run holds them.

    A call that cannot be made again holds all that its backward reads, whatever becomes of that elsewhere.
    """
    readers: dict[int, list[int]] = {}
    last_use: dict[int, int] = {}
    for number, fact in enumerate(build.facts):
        for other in build.calls(fact.kept_keys):
            readers.setdefault(other, []).append(number)
        last_use.update(dict.fromkeys(build.calls(fact.reads), number))
    own = [
        set(build.calls(fact.kept_keys)) - {number} if fact.has_state else set()
        for number, fact in enumerate(build.facts)
    ]
    for other, found in readers.items():
        if found == [last_use.get(other)] and other not in build.outputs:
            own[found[0]].add(other)
    return own
