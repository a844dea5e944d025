"""Take back recomputations that the budget does not need.

In: a tape. Out: the same tape with fewer recomputations, never over a budget that it met before. A recomputation that
nothing reads goes first; the others are tried in order of time saved per byte held, and stay where keeping the
earlier version would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.tape import Tape


def pruned(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule, which fits and has the form of a tape, without what it need not compute again."""
    tape = Tape(problem)
    for key in keys_of(schedule, tape.shape.count):
        tape.insert(key)
    prune(tape, problem.budget_bytes)
    return tape.schedule()


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
    tape: Tape, budget: int, steps: Sequence[int] | None = None, weight: Callable[[int], float] | None = None
) -> None:
    """Remove every recomputation (of `steps`, if given) whose removal keeps the peak within `budget`."""
    remove_unused(tape)
    shape, count = tape.shape, tape.shape.count

    def gain(key: int) -> float:
        number = key % count
        return (shape.time[number] + 1e-9) / (shape.output_bytes[number] + 1) * (weight(number) if weight else 1.0)

    for key in sorted(tape.extra_steps() if steps is None else steps, key=gain, reverse=True):
        if tape.runs(key):
            try_remove(tape, budget, key)


def try_remove(tape: Tape, budget: int, key: int) -> bool:
    """Remove the step at `key` and all that only it needed, unless the peak then passes `budget`."""
    mark = len(tape.journal)
    tape.remove(key)
    if tape.peak > budget:
        # Its sources may take more memory than it does: judge only once they are gone too.
        remove_unused(tape, _sources(tape, key))
        if tape.peak > budget:
            tape.rewind(mark)
            return False
    remove_unused(tape, _sources(tape, key))
    return True


def remove_unused(tape: Tape, steps: Sequence[int] | None = None) -> None:
    """Remove recomputations that nothing reads, and then those that only they needed."""
    stack = list(tape.extra_steps() if steps is None else steps)
    stack.sort()
    while stack:
        key = stack.pop()
        if tape.runs(key) and not tape.is_used(key):
            tape.remove(key)
            stack += _sources(tape, key)


def _sources(tape: Tape, key: int) -> list[int]:
    """Recomputations that the step at `key` reads or would read."""
    shape, result = tape.shape, []
    for value in shape.inputs[key % shape.count]:
        birth, _ = tape.version(value, key)
        if birth % (shape.count + 1):
            result.append(birth)
    return result
