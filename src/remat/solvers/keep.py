"""From a set of values to keep to a schedule: everything else is dropped and computed again just in time.

In: a tape of the plain schedule, the ops at which values are dropped (usually the first of backward), and what stays at
each. Out: the tape with recomputations added: each dropped value is computed again in the stage that first reads
it, from whatever is there, and stays until its last use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.prune import remove_unused
from remat.solvers.tape import Shape, Tape


def first_backward(problem: Problem) -> int:
    """The first op of backward; the number of ops where there is none."""
    ops = problem.graph.ops
    return next((number for number, op in enumerate(ops) if op.backward), len(ops))


def drop_all_but(tape: Tape, kept: Sequence[Collection[int]], cuts: Sequence[int]) -> None:
    """At each op of `cuts`, drop every earlier value that is not in `kept` there; compute it again just in time.

    A value that an earlier cut dropped and this one keeps is computed again here. Values of ops that must run once are
    kept whatever `kept` says.
    """
    shape = tape.shape
    present = [True] * len(shape.size)
    chosen = dict(zip(cuts, kept, strict=True))
    for stage in range(shape.count):
        wanted = shape.inputs[stage]
        if stage in chosen:
            wanted += tuple(value for value in chosen[stage] if shape.producer[value] < stage)
        for number in missing_ops(shape, wanted, present):
            tape.insert(stage * shape.count + number)
            for value in shape.outputs[number]:
                present[value] = True
        if stage in chosen:
            _drop(shape, present, chosen[stage], stage)
    tail = [value for value in shape.final if not present[value]]
    for number in missing_ops(shape, tail, present):
        tape.insert(shape.count * shape.count + number)


def _drop(shape: Shape, present: list[bool], kept: Collection[int], cut: int) -> None:
    for value, producer in enumerate(shape.producer):
        if producer < cut and value not in kept and shape.recomputable[producer]:
            present[value] = False


def missing_ops(shape: Shape, values: Collection[int], present: list[bool]) -> list[int]:
    """The ops to run, in order, so that `values` are there, reading only what is `present` or computed on the way."""
    found: set[int] = set()
    stack = [shape.producer[value] for value in values if not present[value]]
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack += [shape.producer[value] for value in shape.inputs[number] if not present[value]]
    return sorted(found)


def keep_schedule(problem: Problem, kept: Collection[int]) -> Schedule:
    """The schedule that keeps `kept` from forward to backward and computes the rest again just in time."""
    tape = Tape(problem)
    drop_all_but(tape, [kept], [first_backward(problem)])
    remove_unused(tape)
    return tape.schedule()
