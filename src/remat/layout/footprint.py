"""What a step would take if memory were never shared, what it takes at its peak, and what an arena for it would take.

In: a `StepProfile`, measured, estimated or replayed from a plan. Out: a `Footprint`, with what sharing saves and what
writing over dying inputs would save on top. Everything is counted, resident memory and workspace included.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.results.profile import StepProfile
from remat.core.search.limits import Limits
from remat.layout.auto import LayoutAuto
from remat.layout.problem import Buffer, LayoutProblem
from remat.layout.storages import choose_in_place, merged, storages_of_step

FOOTPRINT_GAP, TIME_LIMIT_S = 0.01, 1.0
"""An arena proven to be within this share of the lowest one is good enough to be told; so is what is found in time."""


@dataclass(frozen=True, slots=True)
class Footprint:
    total_bytes: int
    """All tensors and workspace together, each with memory of its own."""
    peak_bytes: int
    """The most that is alive at one time."""
    arena_bytes: int
    """One piece of memory in which each has its address ahead of time."""
    written_over_bytes: int
    """Results of elementwise ops that can be written over an input that dies with them, taken together."""
    in_place_arena_bytes: int
    """The arena where they are."""
    reserved_bytes: int | None = None
    """What a caching allocator really took from the device; None where there is none."""

    @property
    def sharing_bytes(self) -> int:
        """What sharing memory over time saves."""
        return self.total_bytes - self.arena_bytes

    @property
    def in_place_bytes(self) -> int:
        """What in-place ops save of the arena on top: as much as they save where it is highest."""
        return self.arena_bytes - self.in_place_arena_bytes


def footprint(profile: StepProfile, arena_bytes: int | None = None) -> Footprint:
    """What `profile` adds up to; `arena_bytes` is its arena where it is known already."""
    storages = storages_of_step(profile)
    height = arena_bytes if arena_bytes is not None else _height(storages.buffers)
    chosen = choose_in_place(storages)
    return Footprint(
        total_bytes=sum(buffer.size for buffer in storages.buffers),
        peak_bytes=profile.peak_bytes,
        arena_bytes=height,
        written_over_bytes=sum(storages.buffers[born].size for _, born in chosen),
        in_place_arena_bytes=min(height, _height(merged(storages, chosen))) if chosen else height,
        reserved_bytes=profile.reserved_bytes or None,
    )


def _height(buffers: tuple[Buffer, ...]) -> int:
    return LayoutAuto().solve(LayoutProblem(buffers), Limits(TIME_LIMIT_S, FOOTPRINT_GAP)).height
