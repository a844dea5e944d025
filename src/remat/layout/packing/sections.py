"""Time reduced to what matters: the largest sets of buffers that are alive together.

Between a birth and the next death the set alive only grows, so one section stands for the whole stretch: whatever is
true of its set is true of the smaller ones. A buffer lives in the sections `first` up to, but not including, `end`.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.layout.problem import LayoutProblem


@dataclass(frozen=True, slots=True)
class Sections:
    count: int
    first: tuple[int, ...]
    end: tuple[int, ...]


def find_sections(problem: LayoutProblem) -> Sections:
    """The sections of `problem` in order of time; at most one for each buffer."""
    events = [(buffer.upper, False, number) for number, buffer in enumerate(problem.buffers)]
    events += [(buffer.lower, True, number) for number, buffer in enumerate(problem.buffers)]
    first, end = [0] * len(problem.buffers), [0] * len(problem.buffers)
    count, grown = 0, False
    for _, begins, number in sorted(events):
        if begins:
            first[number], grown = count, True
            continue
        if grown:
            count, grown = count + 1, False
        end[number] = count
    return Sections(count, tuple(first), tuple(end))
