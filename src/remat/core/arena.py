"""One piece of memory for everything that a schedule computes: how high it is, and where each buffer lies in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets are those of the buffers of `layout.lifetimes`, in its order; `layout.check_arena` holds them to it."""

    block_bytes: int
    """Buffers are rounded up to whole blocks and begin at multiples of them."""
    height_bytes: int
    """The end of the highest buffer; what is resident lies elsewhere."""
    offsets: tuple[int, ...]
