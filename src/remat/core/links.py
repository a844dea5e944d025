"""What a link between ranks does: bandwidth and latency in, seconds of collectives out.

The usual model of rings: of n ranks, each sends what it has n - 1 times on to the next, so that an all-gather or a
reduce-scatter of `size` bytes takes (n - 1) / n * size / bandwidth and n - 1 times the latency, an all-reduce twice
that. Figures are of one direction between one rank and the next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLink:
    bytes_per_s: float
    latency_s: float

    def gather_s(self, size_bytes: int, ranks: int) -> float:
        """An all-gather to, or a reduce-scatter from, `size_bytes` on every rank."""
        return (ranks - 1) * (size_bytes / ranks / self.bytes_per_s + self.latency_s)

    def send_s(self, size_bytes: int) -> float:
        """From one rank to another."""
        return size_bytes / self.bytes_per_s + self.latency_s

    def reduce_s(self, size_bytes: int, ranks: int) -> float:
        """An all-reduce of `size_bytes`."""
        return 2 * self.gather_s(size_bytes, ranks)
