"""From a set of values to keep to a schedule: everything else is dropped and computed again just in time.

In: the plain schedule to be edited, the ops at which values are dropped (usually the first of backward), and what stays
at each. Out: the same with recomputations added: each dropped value is computed again in the stage that first reads
it, from whatever is there, and stays until its last use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from remat.core.graph import OpId
from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.search.deadline import check_time
from remat.core.simulate import simulate
from remat.solvers.schedule.editable import EditableSchedule, FlatProblem, flatten


def first_backward(problem: Problem) -> int:
    """The first op of backward; the number of ops where there is none."""
    ops = problem.graph.ops
    return next((number for number, op in enumerate(ops) if op.backward), len(ops))


def turning_point(problem: Problem) -> int:
    """Where values are dropped: the first op of backward or, where none is marked, the op at the plain peak."""
    first = first_backward(problem)
    if first < len(problem.graph.ops) or not first:
        return first
    return simulate(problem, plain_schedule(problem.graph)).peak_step


def drop_all_but(editable: EditableSchedule, kept: Sequence[Collection[int]], cuts: Sequence[int]) -> None:
    """At each op of `cuts`, drop every earlier value that is not in `kept` there; compute it again just in time.

    A value that an earlier cut dropped and this one keeps is computed again here. Values of ops that must run once are
    kept whatever `kept` says.
    """
    flat = editable.flat
    present = [True] * len(flat.size)
    chosen = dict(zip(cuts, kept, strict=True))
    for stage in range(flat.count):
        wanted = flat.inputs[stage]
        if stage in chosen:
            wanted += tuple(value for value in chosen[stage] if flat.producer[value] < stage)
        for key in _bring(flat, wanted, present, stage):
            editable.insert(key)
        if stage in chosen:
            _drop(flat, present, chosen[stage], stage)
    for key in _bring(flat, flat.final, present, flat.count):
        editable.insert(key)


def _bring(flat: FlatProblem, values: Collection[int], present: list[bool], stage: int) -> list[int]:
    """The keys (see `editable`), in order, of ops to run in `stage` so that `values` are there, as they are then."""
    if all(map(present.__getitem__, values)):
        # As for most stages.
        return []
    numbers = missing_ops(flat, values, present)
    for number in numbers:
        for value in flat.outputs[number]:
            present[value] = True
    return [stage * flat.count + number for number in numbers]


def _drop(flat: FlatProblem, present: list[bool], kept: Collection[int], cut: int) -> None:
    for value, producer in enumerate(flat.producer):
        if producer < cut and value not in kept and flat.recomputable[producer]:
            present[value] = False


def missing_ops(flat: FlatProblem, values: Collection[int], present: list[bool]) -> list[int]:
    """The ops to run, in order, so that `values` are there, reading only what is `present` or computed on the way."""
    check_time()
    found: set[int] = set()
    stack = [flat.producer[value] for value in values if not present[value]]
    while stack:
        number = stack.pop()
        if number not in found:
            found.add(number)
            stack += [flat.producer[value] for value in flat.inputs[number] if not present[value]]
    return sorted(found)


def keep_schedule(problem: Problem, kept: Collection[int]) -> Schedule:
    """The schedule that keeps `kept` from forward to backward and computes the rest again just in time."""
    flat, turn = flatten(problem), turning_point(problem)
    # What the op itself reads is in memory at the turn whatever happens.
    read = flat.inputs[turn] if turn < flat.count else ()
    return staged_schedule(flat, [{*kept, *read}], [turn])


def staged_schedule(flat: FlatProblem, kept: Sequence[Collection[int]], cuts: Sequence[int]) -> Schedule:
    """The schedule in which only what is in `kept` stays past each op of `cuts`; the rest runs again just in time.

    Values are dropped before the op runs, even those it reads, and what is not there is not computed for `kept` alone.
    """
    chosen = dict(zip(cuts, kept, strict=True))
    drops = {
        cut: [value for value, producer in enumerate(flat.producer) if producer < cut and value not in stays]
        for cut, stays in chosen.items()
    }
    return dropping_schedule(flat, drops)


def dropping_schedule(flat: FlatProblem, drops: Mapping[int, Collection[int]]) -> Schedule:
    """The schedule in which values are dropped before certain ops, and run again just in time.

    Those of ops that must run once stay.
    """
    check_time()
    present = [True] * len(flat.size)
    keys = list(range(0, flat.count * (flat.count + 1), flat.count + 1))
    for stage in range(flat.count):
        for value in drops.get(stage, ()):
            present[value] = not flat.recomputable[flat.producer[value]]
        keys += _bring(flat, flat.inputs[stage], present, stage)
    keys += _bring(flat, flat.final, present, flat.count)
    return _without_unused(flat, sorted(keys))


def _without_unused(flat: FlatProblem, keys: Sequence[int]) -> Schedule:
    """Going backwards, a recomputation is needed only if something after it reads an output before the next one."""
    wanted, steps = set(flat.final), []
    for key in reversed(keys):
        number = key % flat.count
        outputs = flat.outputs[number]
        if key % (flat.count + 1) and wanted.isdisjoint(outputs):
            continue
        wanted.difference_update(outputs)
        wanted.update(flat.inputs[number])
        steps.append(OpId(number))
    return Schedule(tuple(reversed(steps)))
