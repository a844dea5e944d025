"""Is a placement what it says? A naive second opinion that shares no code with the solvers.

Time passes from event to event, and what is alive is kept in order of offset: a buffer that begins must lie clear of
the next one below and the next one above. Those alive before it are clear of each other, so no other can be in its way.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from remat.errors import InvalidLayout
from remat.layout.problem import LayoutProblem, Placement


def validate(problem: LayoutProblem, placement: Placement) -> None:
    """Raise `InvalidLayout` with the first rule that `placement` breaks."""
    check_offsets(problem, placement.offsets)
    ends = [offset + buffer.size for buffer, offset in zip(problem.buffers, placement.offsets, strict=True)]
    if placement.height != max(ends, default=0):
        raise InvalidLayout(f"The height is {max(ends, default=0)}, the placement says {placement.height}.")
    if placement.bound > placement.height:
        raise InvalidLayout(f"The bound {placement.bound} is above the height {placement.height}.")


def check_offsets(problem: LayoutProblem, offsets: tuple[int, ...]) -> None:
    """Raise `InvalidLayout` where an offset is missing, negative, not aligned, or two buffers overlap."""
    if len(offsets) != len(problem.buffers):
        raise InvalidLayout(f"{len(problem.buffers)} buffers have {len(offsets)} offsets.")
    for buffer, offset in zip(problem.buffers, offsets, strict=True):
        if offset < 0 or offset % buffer.alignment:
            raise InvalidLayout(f"Buffer {buffer.id} lies at {offset}, not at a multiple of {buffer.alignment}.")
    alive: list[tuple[int, int]] = []
    for _, begins, number in _events(problem):
        entry = (offsets[number], number)
        if not begins:
            del alive[bisect_left(alive, entry)]
            continue
        place = bisect_left(alive, entry)
        for below, above in zip(alive[max(place - 1, 0) : place], [entry], strict=False):
            _check_pair(problem, below, above)
        for below, above in zip([entry], alive[place : place + 1], strict=False):
            _check_pair(problem, below, above)
        insort(alive, entry)


def _events(problem: LayoutProblem) -> list[tuple[int, bool, int]]:
    """Births and deaths in order of time; at the same time deaths go first, because lives are half-open."""
    births = [(buffer.lower, True, number) for number, buffer in enumerate(problem.buffers)]
    deaths = [(buffer.upper, False, number) for number, buffer in enumerate(problem.buffers)]
    return sorted(births + deaths)


def _check_pair(problem: LayoutProblem, below: tuple[int, int], above: tuple[int, int]) -> None:
    first, second = problem.buffers[below[1]], problem.buffers[above[1]]
    if below[0] + first.size > above[0]:
        raise InvalidLayout(
            f"Buffers {first.id} and {second.id} are alive at the same time and overlap: "
            f"{below[0]} to {below[0] + first.size}, and {above[0]} to {above[0] + second.size}."
        )
