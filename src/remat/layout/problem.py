"""The nouns of address assignment: which buffers live when, and where each of them lies.

A `Buffer` occupies `size` units of memory from `lower` up to, but not including, `upper`. A `LayoutProblem` asks for an
offset for each, so that buffers alive at the same time do not overlap: below `capacity` where there is one, and as low
as possible where there is none. A `Placement` is an answer and what was proven about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from remat.errors import InvalidLayout

LARGEST_NUMBER = 2**62
"""Sums of sizes beyond this are refused: they would not survive 64-bit arithmetic."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Something that needs `size` units of memory at one address for its whole life, `lower` to `upper`, half-open."""

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    """The offset must be a multiple of this."""

    def __post_init__(self) -> None:
        if self.upper <= self.lower:
            raise InvalidLayout(
                f"Buffer {self.id} lives from {self.lower} to {self.upper}; its upper end must be above its lower end."
            )
        if self.size <= 0:
            raise InvalidLayout(f"Buffer {self.id} has the size {self.size}; it must be above zero.")
        if self.alignment <= 0:
            raise InvalidLayout(f"Buffer {self.id} has the alignment {self.alignment}; it must be above zero.")
        if max(-self.lower, self.upper, self.size, self.alignment) > LARGEST_NUMBER:
            raise InvalidLayout(f"Buffer {self.id} has a number beyond 2**62; use a larger unit.")

    def meets(self, other: Buffer) -> bool:
        """Are both alive at some time?"""
        return self.lower < other.upper and other.lower < self.upper


@dataclass(frozen=True, slots=True)
class LayoutProblem:
    """Place `buffers` below `capacity`, or as low as possible where it is None."""

    buffers: tuple[Buffer, ...]
    capacity: int | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.id in seen:
                raise InvalidLayout(f"Two buffers have the id {buffer.id}; ids must differ.")
            seen.add(buffer.id)
        if sum(buffer.size + buffer.alignment for buffer in self.buffers) > LARGEST_NUMBER:
            raise InvalidLayout("Sizes add up to more than 2**62; use a larger unit.")
        if self.capacity is not None and self.capacity < 0:
            raise InvalidLayout(f"The capacity is {self.capacity}; it must not be negative.")

    def fits(self, height: int) -> bool:
        return self.capacity is None or height <= self.capacity


class LayoutStatus(Enum):
    OPTIMAL = "OPTIMAL"
    """It fits, and no placement is lower."""
    FEASIBLE = "FEASIBLE"
    """It fits; a lower one is not excluded."""
    OVER = "OVER"
    """The lowest placement found is above the capacity; one that fits is not excluded."""
    INFEASIBLE = "INFEASIBLE"
    """Proven: no placement fits. The one given is the lowest found."""


@dataclass(frozen=True, slots=True)
class Placement:
    """An offset for each buffer, in the problem's order. It overlaps nowhere, whatever its status."""

    offsets: tuple[int, ...]
    height: int
    """The end of the highest buffer."""
    bound: int
    """Proven: no placement is lower than this."""
    status: LayoutStatus
    solver: str

    @property
    def gap(self) -> float:
        """The share of the height that a perfect placement could still save."""
        return (self.height - self.bound) / self.height if self.height else 0.0
