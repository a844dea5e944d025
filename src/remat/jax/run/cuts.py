"""Where a schedule is cut into segments.

In: a problem and a schedule. Out: for each step, the number of its segment. A segment holds what it was given until its
end, so a value that dies inside it stays a little longer. Each segment grows until that would lift the peak of the
schedule, or until it is as long as allowed: they are short where memory is scarce and long elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate

MOST_STEPS = 16


def segment_numbers(
    problem: Problem, schedule: Schedule, alone: Collection[int], most_steps: int = MOST_STEPS
) -> list[int]:
    """The ops in `alone` are segments of their own, as the boundary between forward and backward has to be."""
    timeline = simulate(problem, schedule)
    deaths = _deaths(problem, schedule, timeline.last_uses)
    numbers: list[int] = []
    start, held = 0, 0
    for step, op in enumerate(schedule.steps):
        # What died in this segment and came from outside is still there.
        held += sum(size for birth, size in deaths[step - 1] if birth < start) if step > start else 0
        is_over = timeline.live_bytes[step] + held > timeline.peak_bytes
        is_turn = step > 0 and (op in alone or schedule.steps[step - 1] in alone)
        if step and (is_over or is_turn or step - start >= most_steps):
            start, held = step, 0
            numbers.append(numbers[-1] + 1)
        else:
            numbers.append(numbers[-1] if numbers else 0)
    return numbers


def _deaths(
    problem: Problem, schedule: Schedule, last_uses: tuple[tuple[int, ...], ...]
) -> list[list[tuple[int, int]]]:
    """For each step, when and with what size those values were made that it is the last to read."""
    found: list[list[tuple[int, int]]] = [[] for _ in schedule.steps]
    for birth, (op, ends) in enumerate(zip(schedule.steps, last_uses, strict=True)):
        for value, end in zip(problem.graph.ops[op].outputs, ends, strict=True):
            found[end].append((birth, problem.costs.size_bytes[value]))
    return found
