"""Which bytes of a store are free.

In: extents (a slab of host memory, a stretch of a file) and requests for bytes. Out: ranges of them. The smallest free
range that is large enough is cut, and neighbours grow together when they are given back: the same requests, made again
in the next step, find the same ranges.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT = 4096
"""A page, and at least a sector of any disk."""


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """Half-open: `[offset, offset + size_bytes)` of an extent."""

    extent: int
    offset: int
    size_bytes: int

    def is_followed_by(self, other: Range) -> bool:
        return self.extent == other.extent and self.offset + self.size_bytes == other.offset

    def joined(self, other: Range) -> Range:
        return Range(self.extent, self.offset, self.size_bytes + other.size_bytes)


def aligned(size_bytes: int) -> int:
    """Whole pages, at least one."""
    return max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT


class Space:
    """Free ranges of extents, in order; several threads may ask at once."""

    def __init__(self) -> None:
        self._free: list[Range] = []
        self._sizes: dict[int, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return sum(item.size_bytes for item in self._free)

    def add_extent(self, size_bytes: int) -> int:
        """A new extent, free as a whole; gives its number."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._sizes[number] = size_bytes
            insort(self._free, Range(number, 0, size_bytes))
            return number

    def drop_free_extents(self) -> list[int]:
        """Forget extents of which no byte is in use; gives their numbers."""
        with self._lock:
            dropped = [item.extent for item in self._free if item.size_bytes == self._sizes[item.extent]]
            self._free = [item for item in self._free if item.extent not in dropped]
            for number in dropped:
                del self._sizes[number]
            return dropped

    def take(self, size_bytes: int) -> Range | None:
        """A range of whole pages with room for so many bytes; None where there is none."""
        wanted = aligned(size_bytes)
        with self._lock:
            fitting = (item for item in self._free if item.size_bytes >= wanted)
            found = min(fitting, key=lambda item: item.size_bytes, default=None)
            if found is None:
                return None
            self._free.remove(found)
            rest = found.size_bytes - wanted
            if rest:
                insort(self._free, Range(found.extent, found.offset + wanted, rest))
            return Range(found.extent, found.offset, wanted)

    def give_back(self, taken: Range) -> None:
        """The range may be used again."""
        with self._lock:
            insort(self._free, taken)
            self._free = _joined(self._free)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for item in ranges:
        if found and found[-1].is_followed_by(item):
            found[-1] = found[-1].joined(item)
        else:
            found.append(item)
    return found
