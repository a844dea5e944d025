"""Is a placement what it says? A naive second opinion that shares no code with the solvers.

Time passes from event to event, and what is alive is kept in order of offset: a buffer that begins must lie clear of
the next one below and the next one above. Those alive before it are clear of each other, so no other can be in its way.
"""

from __future__ import annotations

from bisect import bisect_left

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
    count, buffers = len(offsets), problem.buffers
    # An offset and the number of its buffer as one number, in the order of both.
    alive: list[int] = []
    for event in _events(problem):
        number = event % count
        entry = offsets[number] * count + number
        place = bisect_left(alive, entry)
        if event < count:
            del alive[place]
            continue
        if place > 0:
            below = alive[place - 1] % count
            if offsets[below] + buffers[below].size > offsets[number]:
                raise _overlap(problem, offsets, below, number)
        if place < len(alive) and entry // count + buffers[number].size > alive[place] // count:
            raise _overlap(problem, offsets, number, alive[place] % count)
        alive.insert(place, entry)


def _events(problem: LayoutProblem) -> list[int]:
    """Deaths as the number of their buffer, births as that plus the count of buffers, in order of time.

    At the same time deaths go first, because lives are half-open.
    """
    times = [buffer.upper for buffer in problem.buffers] + [buffer.lower for buffer in problem.buffers]
    return sorted(range(len(times)), key=times.__getitem__)


def _overlap(problem: LayoutProblem, offsets: tuple[int, ...], below: int, above: int) -> InvalidLayout:
    first, second = problem.buffers[below], problem.buffers[above]
    return InvalidLayout(
        f"Buffers {first.id} and {second.id} are alive at the same time and overlap: "
        f"{offsets[below]} to {offsets[below] + first.size}, and {offsets[above]} to {offsets[above] + second.size}."
    )
