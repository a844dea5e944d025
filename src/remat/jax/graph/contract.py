"""A program as a graph of what can be in memory: equations that XLA fuses into their readers are no ops of their own.

In: a `StepProgram`. Out: a `FusedGraph`: ops, each with the equations that it runs. The result of a kernel of its own
(products, convolutions, sums, sorting, gathering, loops) is always a value. A pointwise result is one where a kernel
reads it from memory, where several read it and it was dear to compute or is smaller than what it is computed from, and
where it leaves the step. All others are computed inside each of their readers, as XLA does. Between forward and
backward stands an op of its own: what lives across it is what forward saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.jax.graph.primitives import DEAR, FUSED, LEFT_TO_READERS, SUMS, VIEWS
from remat.jax.graph.program import Constant, Equation, StepProgram

SMALLER = 0.95
"""Of the bytes that a cheap result is computed from: one that is larger is computed again by each of its readers."""
MOST_SUMMANDS = 2.5
"""What reads more than so many times its own size is not put off: sums of many gradients would keep all of them."""
LONGEST = 64
"""Equations that are computed again by each reader of their result; a longer chain is cut."""
CARRY = "carry"
BOUNDARY = "the end of forward"


@dataclass(frozen=True, slots=True)
class Work:
    """What an op runs: equations by number, the last of which makes its values."""

    equations: tuple[int, ...]
    reads: tuple[int, ...]
    """Values of the program that must be in memory: arguments, constants, cotangents and results of other ops."""
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedGraph:
    program: StepProgram
    graph: Graph
    work: tuple[Work, ...]
    """Of each op; that of the boundary is empty."""
    number_of: tuple[int, ...]
    """Of each value of the graph, the program's."""
    boundary: OpId
    carried: tuple[int, ...] = ()
    """Arguments that backward has only where forward saved them; the first op stands for them."""

    @property
    def value_of(self) -> dict[int, ValueId]:
        return {number: ValueId(value) for value, number in enumerate(self.number_of)}


@dataclass(slots=True)
class _Sources:
    """For each value, whether it stays one, and what computing it reads and runs."""

    program: StepProgram
    readers: dict[int, list[Equation]]
    ends: frozenset[int]
    there: set[int]
    """In memory: arguments, constants, cotangents, and results that stay values."""
    real: set[int] = field(default_factory=set)
    reads: dict[int, frozenset[int]] = field(default_factory=dict)
    runs: dict[int, frozenset[int]] = field(default_factory=dict)

    def visit(self, number: int, equation: Equation) -> None:
        reads: set[int] = set()
        runs = {number}
        for item in equation.reads:
            if item in self.there:
                reads.add(item)
            else:
                reads |= self.reads[item]
                runs |= self.runs[item]
        for output in equation.outputs:
            self.reads[output], self.runs[output] = frozenset(reads), frozenset(runs)
        if self._stays(equation, reads):
            self.real.update(equation.outputs)
            self.there.update(equation.outputs)

    def _stays(self, equation: Equation, reads: set[int]) -> bool:
        name = equation.primitive.name
        if name not in FUSED or equation.runs_once or not self.ends.isdisjoint(equation.outputs):
            return True
        readers = [reader for output in equation.outputs for reader in self._real_readers(output)]
        if len(self.runs[equation.outputs[0]]) > LONGEST:
            return True
        if name in VIEWS or name in LEFT_TO_READERS:
            return False
        if any(_reads_memory(reader) for reader in readers):
            return True
        size = sum(self.program.bytes_of(output) for output in equation.outputs)
        read = sum(self.program.bytes_of(item) for item in reads if item in self.real)
        if len(readers) <= 1 and not _crosses(equation, readers):
            return size * MOST_SUMMANDS < read
        return name in DEAR or size <= SMALLER * read

    def _real_readers(self, number: int) -> list[Equation]:
        """Who reads the value, seen through views of it."""
        found: list[Equation] = []
        for reader in self.readers.get(number, ()):
            if reader.primitive.name in VIEWS and self.ends.isdisjoint(reader.outputs):
                found += self._real_readers(reader.outputs[0])
            else:
                found.append(reader)
        return found


def _reads_memory(reader: Equation) -> bool:
    return reader.primitive.name not in FUSED and reader.primitive.name not in SUMS


def _crosses(equation: Equation, readers: Sequence[Equation]) -> bool:
    return not equation.backward and any(reader.backward for reader in readers)


def contract(program: StepProgram, carried: Sequence[int] = ()) -> FusedGraph:
    """See the module's docstring; `carried` arguments are values, which forward saves where backward needs them."""
    sources = _sources(program)
    value_of: dict[int, ValueId] = {number: ValueId(place) for place, number in enumerate(carried)}
    ops: list[Op] = []
    work: list[Work] = []
    boundary = -1
    if carried:
        ops.append(Op(CARRY, (), tuple(value_of.values()), recomputable=False, target=CARRY))
        work.append(Work((), (), ()))
    for number, equation in enumerate(program.equations):
        if equation.backward and boundary < 0:
            boundary = _add_boundary(program, ops, work, value_of)
        if equation.outputs and equation.outputs[0] not in sources.real:
            continue
        if not equation.outputs and not equation.runs_once:
            continue
        item = _work_of(sources, number, equation)
        inputs = tuple(value_of[read] for read in item.reads if read in value_of)
        first = len(value_of)
        value_of.update((output, ValueId(first + place)) for place, output in enumerate(item.makes))
        ops.append(_op(equation, inputs, tuple(value_of[output] for output in item.makes), len(ops)))
        work.append(item)
    if boundary < 0:
        boundary = _add_boundary(program, ops, work, value_of)
    outputs = tuple(value_of[number] for number in sorted(sources.ends) if number in value_of)
    graph = Graph(tuple(ops), len(value_of), outputs)
    return FusedGraph(program, graph, tuple(work), tuple(value_of), OpId(boundary), tuple(carried))


def _op(equation: Equation, inputs: tuple[ValueId, ...], outputs: tuple[ValueId, ...], place: int) -> Op:
    name = equation.primitive.name
    return Op(f"{name}_{place}", inputs, outputs, equation.backward, not equation.runs_once, name, equation.module)


def _add_boundary(program: StepProgram, ops: list[Op], work: list[Work], value_of: dict[int, ValueId]) -> int:
    """What the caller does between forward and backward: it reads the results and gives their cotangents."""
    read = dict.fromkeys(
        value_of[atom] for atom in program.results if not isinstance(atom, Constant) and atom in value_of
    )
    for number in program.cotangents:
        value_of[number] = ValueId(len(value_of))
    made = tuple(value_of[number] for number in program.cotangents)
    ops.append(Op(BOUNDARY, tuple(read), made, recomputable=False))
    work.append(Work((), (), ()))
    return len(ops) - 1


def _work_of(sources: _Sources, number: int, equation: Equation) -> Work:
    runs: set[int] = {number}
    reads: set[int] = set()
    for item in equation.reads:
        if item in sources.there:
            reads.add(item)
        else:
            runs |= sources.runs[item]
            reads |= sources.reads[item]
    return Work(tuple(sorted(runs)), tuple(sorted(reads)), equation.outputs)


def _sources(program: StepProgram) -> _Sources:
    readers: dict[int, list[Equation]] = {}
    for equation in program.equations:
        for item in equation.reads:
            readers.setdefault(item, []).append(equation)
    ends = frozenset(atom for atom in (*program.results, *program.gradients) if not isinstance(atom, Constant))
    there: set[int] = {*program.arguments, *program.cotangents, *(number for number, _ in program.constants)}
    sources = _Sources(program, readers, ends - there, there)
    for number, equation in enumerate(program.equations):
        sources.visit(number, equation)
    return sources
