"""Who is ahead: the fastest peer that fits where we do, our time over its time, and the bar that was set.

In: rows of one model. Out: a `Verdict` for each of our budgets. A peer fits a budget even where its peak is a hundredth
above it; ours must keep to it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.frontier.rows import Row

MIB, GIB = 2**20, 2**30
PEER_TOLERANCE = 1.01
"""Budgets are stated as the peers' peaks in three digits; a peer is not shut out by rounding."""
BARS: Mapping[str, Mapping[float, float]] = {
    "gpt2-medium": {21.2: 1.0, 14.6: 0.98, 12: 0.85, 10: 0.91, 7.83: 0.97},
    "resnet50": {3.35: 1.0, 2.6: 0.92},
}
"""By model and budget in GiB: the most that our time may be of the best peer's."""
SMALLEST: Mapping[str, float] = {"gpt2-medium": 6.5}
"""By model: GiB within which it must train."""
LOSS_APART, NORM_APART = 0.02, 0.2
"""Shares by which the first step's loss and gradients may differ: masks of dropout do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    row: Row
    peer: Row | None
    bar: float | None

    @property
    def ratio(self) -> float | None:
        return self.row.step_ms / self.peer.step_ms if self.row.ran and self.peer is not None else None

    @property
    def holds_budget(self) -> bool:
        row = self.row
        return row.peak_bytes is not None and (row.budget_bytes is None or row.peak_bytes <= row.budget_bytes)

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached within the budget; None where none is set."""
        if self.bar is None:
            return None
        return self.row.ran and self.holds_budget and (self.ratio is None or self.ratio <= self.bar)


def best_peer(rows: Sequence[Row], limit_bytes: float) -> Row | None:
    """The fastest peer that ran and fits."""
    fitting = [row for row in rows if _is_peer_within(row, PEER_TOLERANCE * limit_bytes)]
    return min(fitting, key=lambda row: row.step_ms, default=None)


def verdict_on(row: Row, rows: Sequence[Row], model: str = "") -> Verdict:
    """One row against the peers that fit under its budget or, where it has none, under its own peak."""
    limit = row.budget_bytes if row.budget_bytes is not None else row.peak_bytes
    peer = None if limit is None else best_peer(rows, limit)
    return Verdict(row, peer, _bar(model, row.budget_bytes) if row.is_ours else None)


def verdicts(model: str, rows: Sequence[Row]) -> list[Verdict]:
    """Of all our rows, the largest budget first."""
    ours = sorted((row for row in rows if row.is_ours), key=lambda row: -(row.budget_bytes or 0))
    return [verdict_on(row, rows, model) for row in ours]


def budgets_by_peers(rows: Sequence[Row], *, timed: bool = True) -> list[str]:
    """Of ours: the peaks of peers that no other beats in both, the middle of the two leanest, and 0.85 of the leanest.

    Where they are not yet `timed` with the device to themselves, the peaks of all. Rounded up to a MiB, so that no peer
    is shut out of the budget that is its own.
    """
    ran = [row for row in rows if not row.is_ours and row.ran]
    best = [row for row in ran if not timed or not any(_beats(other, row) for other in ran)]
    peaks = sorted({row.peak_bytes for row in best if row.peak_bytes is not None}, reverse=True)
    wanted = [*peaks, *([sum(peaks[-2:]) // 2] if len(peaks) > 1 else []), *([0.85 * peaks[-1]] if peaks else [])]
    return [f"{math.ceil(size / MIB)}MiB" for size in sorted(wanted, reverse=True)]


def _beats(one: Row, other: Row) -> bool:
    assert one.peak_bytes is not None and other.peak_bytes is not None, "both ran"
    return one.peak_bytes <= other.peak_bytes and one.step_ms < other.step_ms


def smallest_ours(rows: Sequence[Row]) -> Row | None:
    """Our row with the smallest peak that kept to its budget."""
    held = [row for row in rows if row.is_ours and row.ran and verdict_on(row, rows).holds_budget]
    return min(held, key=lambda row: row.peak_bytes or 0, default=None)


def doubts(rows: Sequence[Row]) -> Iterator[str]:
    """Rows whose first step computed something else than the others."""
    for word, apart, values in (
        ("loss", LOSS_APART, {row.label: row.loss for row in rows if row.ran}),
        ("gradient norm", NORM_APART, {row.label: row.gradient_norm for row in rows if row.ran}),
    ):
        known = [value for value in values.values() if value is not None]
        usual = statistics.median(known) if known else 0.0
        for label, value in values.items():
            if value is None:
                yield f"{label}: the {word} of the first step is not finite"
            elif abs(value - usual) > apart * abs(usual):
                yield f"{label}: the {word} of the first step is {value:.4g}, others have {usual:.4g}"


def _is_peer_within(row: Row, limit_bytes: float) -> bool:
    return not row.is_ours and row.ran and row.peak_bytes is not None and row.peak_bytes <= limit_bytes


def _bar(model: str, budget_bytes: int | None) -> float | None:
    if budget_bytes is None:
        return None
    return next((bar for gib, bar in BARS.get(model, {}).items() if abs(budget_bytes / GIB - gib) < 0.005), None)
