"""What sharing memory saves in a step: as words, as rows of a table, and as facts for programs.

In: a step and its `Footprint`. Out: text. What dynamic allocation reserved is a fact of a measured step on a device
with a caching allocator; elsewhere it says that it is not known.
"""

from __future__ import annotations

from dataclasses import asdict

from remat.core.budget import format_bytes
from remat.core.results.profile import StepProfile
from remat.layout.footprint import Footprint


def sharing_words(step: StepProfile, found: Footprint) -> str:
    """All of it in three or four sentences."""
    reserved = f"The allocator really reserved {format_bytes(found.reserved_bytes or 0)}."
    return (
        f"All tensors together are {format_bytes(found.total_bytes)}; {format_bytes(found.peak_bytes)} are alive at "
        f"once, and with addresses ahead of time all fit in an arena of {format_bytes(found.arena_bytes)}: sharing "
        f"saves {format_bytes(found.sharing_bytes)}. {format_bytes(found.written_over_bytes)} of results can be "
        f"written over inputs that die with them, which lowers the arena by {format_bytes(found.in_place_bytes)}. "
        f"{reserved if found.reserved_bytes is not None else _unknown(step)}"
    )


def sharing_rows(step: StepProfile, found: Footprint) -> list[tuple[str, str, str]]:
    """What, how much, and a note, from the most memory to the least."""
    over = found.arena_bytes / found.peak_bytes - 1 if found.peak_bytes else 0.0
    reserved = "not known" if found.reserved_bytes is None else format_bytes(found.reserved_bytes)
    written = f"{format_bytes(found.written_over_bytes)} of results over inputs that die with them"
    return [
        ("all tensors", format_bytes(found.total_bytes), "workspace included, each with memory of its own"),
        ("alive at the peak", format_bytes(found.peak_bytes), ""),
        ("arena", format_bytes(found.arena_bytes), f"each at an address ahead of time; {over:.2%} above the peak"),
        ("arena, in place", format_bytes(found.in_place_arena_bytes), written),
        ("reserved by the allocator", reserved, "" if found.reserved_bytes is not None else _unknown(step)),
        ("saved by sharing", format_bytes(found.sharing_bytes), "all tensors less the arena"),
        ("saved in place", format_bytes(found.in_place_bytes), "of the arena, on top"),
    ]


def footprint_facts(found: Footprint) -> dict[str, int | None]:
    return {**asdict(found), "sharing_bytes": found.sharing_bytes, "in_place_bytes": found.in_place_bytes}


def _unknown(step: StepProfile) -> str:
    if step.is_estimate:
        return "What dynamic allocation reserves is known of measured steps on CUDA."
    return f"What dynamic allocation reserved is not known on {step.device}."
