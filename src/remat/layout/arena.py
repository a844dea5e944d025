"""The arena of a schedule: an address for every version of every value, and for every workspace.

In: a problem and a schedule. Out: an `Arena`, as low as can be found in the time, or below a capacity. `check_arena`
holds one that comes from elsewhere, as from a file, to its schedule.
"""

from __future__ import annotations

from remat.core.arena import Arena
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.search.limits import Limits
from remat.errors import InvalidLayout
from remat.layout.auto import LayoutAuto
from remat.layout.base import height_of
from remat.layout.liveness import lifetimes
from remat.layout.problem import LayoutProblem
from remat.layout.validate import check_offsets

ARENA_GAP = 0.002
"""Without a capacity: an arena proven to be within this share of the lowest one is good enough."""


def lay_out(
    problem: Problem,
    schedule: Schedule,
    *,
    block_bytes: int,
    capacity_bytes: int | None = None,
    time_limit_s: float = 1.0,
    seed: int = 0,
) -> Arena:
    """The lowest arena found for `schedule`; with a capacity, the first one below it."""
    wanted = None if capacity_bytes is None else max(capacity_bytes, 0)
    placing = LayoutProblem(lifetimes(problem, schedule, block_bytes=block_bytes), wanted)
    found = LayoutAuto().solve(placing, Limits(time_limit_s, ARENA_GAP, seed))
    return Arena(block_bytes, found.height, found.offsets)


def check_arena(problem: Problem, schedule: Schedule, arena: Arena) -> None:
    """Raise `InvalidLayout` where two buffers overlap or the arena is not as high as it says."""
    if arena.block_bytes < 1:
        raise InvalidLayout(f"The arena's blocks have {arena.block_bytes} bytes; they must have at least one.")
    placing = LayoutProblem(lifetimes(problem, schedule, block_bytes=arena.block_bytes))
    check_offsets(placing, arena.offsets)
    height = height_of(placing, arena.offsets)
    if height != arena.height_bytes:
        raise InvalidLayout(f"The arena is {height} bytes high and says {arena.height_bytes}.")
