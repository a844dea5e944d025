"""What collectives take: a link in, seconds out.

The usual model of rings: of n ranks, each sends what it has n - 1 times on to the next, so that an all-gather or a
reduce-scatter of `size` bytes takes (n - 1) / n * size / bandwidth and n - 1 times the latency, an all-reduce twice
that. Figures are of one direction between one rank and the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ENGINES = ("ddp", "zero1", "fsdp", "fsdp:keep")
"""Who trains on several ranks; `fsdp` frees gathered parameters after forward, `fsdp:keep` keeps them for backward."""


@dataclass(frozen=True, slots=True)
class RankLink:
    bytes_per_s: float
    latency_s: float

    def gather_s(self, size_bytes: int, ranks: int) -> float:
        """An all-gather to, or a reduce-scatter from, `size_bytes` on every rank."""
        return (ranks - 1) * (size_bytes / ranks / self.bytes_per_s + self.latency_s)

    def reduce_s(self, size_bytes: int, ranks: int) -> float:
        """An all-reduce of `size_bytes`."""
        return 2 * self.gather_s(size_bytes, ranks)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one step, by the bytes that each rank has before or after them in one piece."""

    gathered_bytes: tuple[int, ...] = ()
    scattered_bytes: tuple[int, ...] = ()
    reduced_bytes: tuple[int, ...] = ()

    @property
    def calls(self) -> int:
        return len(self.gathered_bytes) + len(self.scattered_bytes) + len(self.reduced_bytes)

    def seconds(self, link: RankLink, ranks: int) -> float:
        """One after the other, without what computation hides."""
        halves: Iterable[int] = (*self.gathered_bytes, *self.scattered_bytes)
        return sum(link.gather_s(size, ranks) for size in halves) + sum(
            link.reduce_s(size, ranks) for size in self.reduced_bytes
        )
