"""The other way round: not the fastest schedule within a budget, but the smallest peak within a time.

In: candidates that are known, and a way to solve for one more budget. Out: the candidate with the smallest peak that is
fast enough. The next budget to try lies where the line between the leanest fast one and its slow neighbour meets the
time: because time is a convex function of memory, more or less, what is found there is mostly fast enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat.solvers.frontier import Candidate

NEAR_SHARE = 0.005
"""Budgets closer than this share of each other are not told apart."""
STRIDE_SHARE = 0.25
"""Each try goes at least this share of the way and leaves as much, so that a steep end does not hold it up."""


def find_leanest(
    known: Sequence[Candidate],
    time_ns: float,
    solve_at: Callable[[int], Candidate | None],
    *,
    floor_bytes: int,
    rounds: int,
) -> Candidate | None:
    """The leanest of `known` and of up to `rounds` more; None where nothing known is fast enough.

    Nothing fits in `floor_bytes`. `solve_at` takes a budget and may find nothing.
    """
    found, refused = list(known), floor_bytes
    for _ in range(rounds):
        best = leanest(found, time_ns)
        if best is None:
            return None
        budget = _between(best, _slow_neighbour(found, best), refused, time_ns)
        if best.peak_bytes - budget <= NEAR_SHARE * best.peak_bytes:
            break
        more = solve_at(budget)
        if more is None:
            refused = budget
        else:
            found.append(more)
    return leanest(found, time_ns)


def leanest(known: Sequence[Candidate], time_ns: float) -> Candidate | None:
    """The one with the smallest peak that takes at most `time_ns`."""
    fast = [item for item in known if item.solution.time_ns <= time_ns]
    return min(fast, key=lambda item: (item.peak_bytes, item.solution.time_ns), default=None)


def _slow_neighbour(found: Sequence[Candidate], best: Candidate) -> Candidate | None:
    below = (item for item in found if item.budget_bytes < best.peak_bytes)
    return max(below, key=lambda item: item.budget_bytes, default=None)


def _between(best: Candidate, slow: Candidate | None, refused: int, time_ns: float) -> int:
    """A budget below the best one's peak and above what is too slow or was refused."""
    if slow is None or slow.budget_bytes < refused:
        return (best.peak_bytes + refused) // 2
    span = slow.solution.time_ns - best.solution.time_ns
    share = (time_ns - best.solution.time_ns) / span if span > 0 else 0.5
    share = min(max(share, STRIDE_SHARE), 1 - STRIDE_SHARE)
    return best.peak_bytes - int(share * (best.peak_bytes - slow.budget_bytes))
