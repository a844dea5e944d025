"""Take back recomputations that the budget does not need.

In: an editable schedule. Out: the same with fewer recomputations, never over a budget that it met before. Those that
nothing reads go first; the others are tried in order of time saved per byte held, and stay where keeping the earlier
version would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.schedule.editable import EditableSchedule


def pruned(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule, which fits and has the form of an editable schedule, without what it need not compute again."""
    editable = EditableSchedule(problem)
    for key in keys_of(schedule, editable.flat.count):
        editable.insert(key)
    prune(editable, problem.budget_bytes)
    return editable.schedule()


def keys_of(schedule: Schedule, count: int) -> list[int]:
    """The keys of the recomputations in a schedule of `count` ops."""
    keys, stage = [], 0
    for number in schedule.steps:
        if number == stage:
            stage += 1
        else:
            keys.append(stage * count + number)
    return keys


def prune(
    editable: EditableSchedule,
    budget: int,
    steps: Sequence[int] | None = None,
    weight: Callable[[int], float] | None = None,
) -> None:
    """Remove every recomputation (of `steps`, if given) whose removal keeps the peak within `budget`."""
    remove_unused(editable)
    flat, count = editable.flat, editable.flat.count

    def gain(key: int) -> float:
        number = key % count
        return (flat.time[number] + 1e-9) / (flat.output_bytes[number] + 1) * (weight(number) if weight else 1.0)

    for key in sorted(editable.extra_steps() if steps is None else steps, key=gain, reverse=True):
        if editable.runs(key):
            try_remove(editable, budget, key)


def try_remove(editable: EditableSchedule, budget: int, key: int) -> bool:
    """Remove the step at `key` and all that only it needed, unless the peak then passes `budget`."""
    mark = len(editable.journal)
    editable.remove(key)
    if editable.peak > budget:
        # Its sources may take more memory than it does: judge only once they are gone too.
        remove_unused(editable, _sources(editable, key))
        if editable.peak > budget:
            editable.rewind(mark)
            return False
    remove_unused(editable, _sources(editable, key))
    return True


def remove_unused(editable: EditableSchedule, steps: Sequence[int] | None = None) -> None:
    """Remove recomputations that nothing reads, and then those that only they needed."""
    stack = list(editable.extra_steps() if steps is None else steps)
    stack.sort()
    while stack:
        key = stack.pop()
        if editable.runs(key) and not editable.is_used(key):
            editable.remove(key)
            stack += _sources(editable, key)


def _sources(editable: EditableSchedule, key: int) -> list[int]:
    """Recomputations that the step at `key` reads or would read."""
    flat, result = editable.flat, []
    for value in flat.inputs[key % flat.count]:
        birth, _ = editable.version(value, key)
        if birth % (flat.count + 1):
            result.append(birth)
    return result
