"""Make a schedule fit by dropping values at its peak, best bytes·steps per second of recomputation first (after μ-TWO).

In: an editable schedule and a budget. Out: recomputations added to it until it fits, or until nothing more can be
dropped.
While the peak is over the budget: of the values that are in memory there but idle, drop one between its two uses around
the peak, and run its op again in the stage of the second use. What that run reads must be there: an input that is not
in memory at the peak is either kept across it or computed again too, whichever costs less at `price` seconds per byte.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from remat.core.search.deadline import check_time
from remat.solvers.schedule.editable import END_KEY, EditableSchedule

PRICES = (0.3, 3.0, 30.0)
"""Worth of a byte across the peak, in units of the plain step's time per byte of its peak (`unit_price`)."""
MAX_GROWTH_FACTOR = 6
"""A schedule has at most this many times the steps of the plain one."""
NEGLIGIBLE_DROP_SHARE = 1e-3
"""A value below this share of what is over the budget is not worth a recomputation there."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Dropping one value across the peak: the steps to add, what they cost and what they free there."""

    steps: tuple[int, ...]
    time: float
    freed: int


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """How to weigh drops against each other."""

    price: float = 0.0
    """Seconds that a byte across the peak is worth; 0 keeps an input whenever that still frees memory."""
    weight: Callable[[int], float] | None = None
    """A factor on each op's time; searches use it to vary their choices."""
    bold: bool = False
    """Let a drop raise the load elsewhere above the peak; later drops may bring that down again."""
    early: bool = False
    """Compute a dropped value again at the quietest moment before it is read, rather than just in time."""


def unit_price(editable: EditableSchedule) -> float:
    """The plain step's time per byte of its peak: the scale on which bytes and seconds are traded."""
    return sum(editable.flat.time) / max(editable.peak, 1)


def evict(
    editable: EditableSchedule, budget: int, rule: EvictionRule, *, stop: Callable[[], bool], max_steps: int
) -> bool:
    """Add recomputations until the peak is within `budget`; False when stuck, stopped or too long."""
    while True:
        place = int(editable.load.argmax()) if editable.length else 0
        if editable.peak <= budget:
            return True
        if not editable.length or stop() or editable.length > max_steps or not _relieve(editable, budget, rule, place):
            return False


def _relieve(editable: EditableSchedule, budget: int, rule: EvictionRule, place: int) -> bool:
    """Drop values until the step at `place` fits or has lost the most it can; False when nothing could be dropped."""
    peak_key, peak = int(editable.keys[place]), int(editable.load[place])
    heap = _candidates(editable, budget, rule, peak_key)
    changed = False
    while heap and editable.load[editable.position(peak_key)] > budget:
        score, value, area = heapq.heappop(heap)
        drop = plan_drop(editable, rule, value, peak_key)
        if drop is None:
            continue
        fresh = _score(drop, area)
        if heap and fresh > heap[0][0] * (1 - 1e-12) and fresh > score:
            heapq.heappush(heap, (fresh, value, area))
            continue
        if _apply(editable, rule, value, drop, peak_key, peak):
            changed = True
    return changed


def _apply(editable: EditableSchedule, rule: EvictionRule, value: int, drop: Drop, peak_key: int, peak: int) -> bool:
    """Drop `value` and compute it again just in time or at a quieter moment, whichever `rule` prefers and works."""
    if rule.early and _drop_early(editable, rule, value, peak_key, peak):
        return True
    return _try_drop(editable, rule, drop, peak_key, peak) or (
        not rule.early and _drop_early(editable, rule, value, peak_key, peak)
    )


def _try_drop(editable: EditableSchedule, rule: EvictionRule, drop: Drop, peak_key: int, peak: int) -> bool:
    """Add the steps of `drop`; take them back if the peak does not fall, or rises elsewhere."""
    mark, before = len(editable.journal), editable.load[editable.position(peak_key)]
    for key in drop.steps:
        editable.insert(key)
    if editable.load[editable.position(peak_key)] < before and (rule.bold or editable.peak <= peak):
        return True
    editable.rewind(mark)
    return False


def _drop_early(editable: EditableSchedule, rule: EvictionRule, value: int, peak_key: int, peak: int) -> bool:
    """Run the value's op again not just in time but at the quietest moment before."""
    gap = idle_gap(editable, value, peak_key)
    if gap is None:
        return False
    low, high = editable.position(peak_key) + 1, editable.position(gap[1])
    if high <= low:
        return False
    quiet = int(editable.keys[low + int(editable.load[low:high].argmin())]) // editable.flat.count
    drop = plan_drop(editable, rule, value, peak_key, quiet)
    return drop is not None and _try_drop(editable, rule, drop, peak_key, peak)


def _candidates(
    editable: EditableSchedule, budget: int, rule: EvictionRule, peak_key: int
) -> list[tuple[float, int, float]]:
    """A heap of (score, value, area) of the values idle across the peak; the smallest score is the best drop.

    Scores are optimistic, as if an op's inputs were there: what is missing is found out when its turn comes.
    """
    check_time()
    flat, keys = editable.flat, editable.keys
    over = np.concatenate([[0], np.cumsum(editable.load > budget)])
    smallest = (int(editable.load[editable.position(peak_key)]) - budget) * NEGLIGIBLE_DROP_SHARE
    heap = []
    for value, size in enumerate(flat.size):
        producer = flat.producer[value]
        gap = idle_gap(editable, value, peak_key) if size > smallest and flat.recomputable[producer] else None
        if gap is None:
            continue
        low, high = keys.searchsorted(gap[0], "right"), keys.searchsorted(gap[1])
        area = float(over[high] - over[low]) + 1.0
        time = flat.time[producer] * (rule.weight(producer) if rule.weight else 1.0)
        heap.append((_score(Drop((), time, flat.output_bytes[producer]), area), value, area))
    heapq.heapify(heap)
    return heap


def _score(drop: Drop, area: float) -> float:
    return (drop.time + 1e-9) / (drop.freed * area)


def idle_gap(editable: EditableSchedule, value: int, peak_key: int) -> tuple[int, int] | None:
    """The last use before and the first use after the peak of a version that is in memory there and idle."""
    if editable.computes[editable.flat.producer[value]][0] >= peak_key:
        return None
    birth, last = editable.version(value, peak_key)
    if last <= peak_key:
        return None
    uses = editable.uses[value]
    at = bisect_right(uses, peak_key)
    before = uses[at - 1] if at else birth
    return None if before == peak_key else (max(before, birth), uses[at])


def plan_drop(
    editable: EditableSchedule, rule: EvictionRule, value: int, peak_key: int, stage: int = -1
) -> Drop | None:
    """How to drop `value` across the peak and compute it again in `stage` (just in time, unless given).

    None where that is impossible or frees nothing.
    """
    check_time()
    gap = idle_gap(editable, value, peak_key)
    if gap is None:
        return None
    flat, count = editable.flat, editable.flat.count
    if stage < 0:
        stage = count if gap[1] == END_KEY else gap[1] // count
    if stage * count + flat.producer[value] <= peak_key:
        return None
    steps: dict[int, None] = {}
    freed, time = _add_step(editable, rule, stage, flat.producer[value], peak_key, steps)
    return Drop(tuple(sorted(steps)), time, freed) if freed > 0 else None


def _add_step(
    editable: EditableSchedule, rule: EvictionRule, stage: int, root: int, peak_key: int, steps: dict[int, None]
) -> tuple[int, float]:
    """Collect the steps that run `root` again in `stage`; returns bytes freed at the peak and the time it takes."""
    flat, count = editable.flat, editable.flat.count
    freed, time, stack = 0, 0.0, [root]
    while stack:
        number = stack.pop()
        key = stage * count + number
        if key in steps or editable.runs(key):
            continue
        steps[key] = None
        editable.work += 1
        time += flat.time[number] * (rule.weight(number) if rule.weight else 1.0)
        freed += _freed(editable, number, key, peak_key)
        for value in flat.inputs[number]:
            birth, last = editable.version(value, key)
            if birth > peak_key or last > peak_key:
                continue
            producer = flat.producer[value]
            again = stage * count + producer
            if again in steps:
                continue
            keeps = flat.size[value] * rule.price < flat.time[producer]
            if not flat.recomputable[producer] or again <= peak_key or keeps:
                freed -= flat.size[value]
            else:
                stack.append(producer)
    return freed, time


def _freed(editable: EditableSchedule, number: int, key: int, peak_key: int) -> int:
    """Bytes at the peak of the outputs that would end before it, were op `number` to run again at `key`."""
    flat, freed = editable.flat, 0
    for value in flat.outputs[number]:
        birth, last = editable.version(value, key)
        if birth > peak_key or last < key:
            continue
        uses = editable.uses[value]
        if not _used_between(uses, peak_key, key):
            freed += flat.size[value]
    return freed


def _used_between(uses: list[int], low: int, high: int) -> bool:
    """Is there a use at `low` or later, before `high`?"""
    at = bisect_right(uses, low - 1)
    return at < len(uses) and uses[at] < high
