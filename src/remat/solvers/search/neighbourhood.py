"""Large-neighbourhood search: undo part of a schedule, repair it with other choices, keep what is faster.

In: an editable schedule and a budget. Out: faster ones within the budget, or lower ones while it is still over the
budget, offered one by one. Each round removes the recomputations of a random window of stages or ops (or a random share
of all), which raises the peak, makes the schedule fit again with randomly weighted times, and prunes. A round that does
not help is rewound. Rounds are counted, so that a seed gives one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.evict import MAX_GROWTH_FACTOR, EvictionRule, evict, unit_price
from remat.solvers.schedule.prune import prune


@dataclass(frozen=True, slots=True)
class SearchLimits:
    rounds: int = 2000
    patience: int = 250
    """Rounds without improvement after which the search gives up."""
    work: int = 2_000_000
    """Work on the schedule after which the search gives up."""


def improve(
    editable: EditableSchedule,
    budget: int,
    limits: SearchLimits,
    seed: int,
    stop: Callable[[], bool],
    offer: Callable[[EditableSchedule], object] = lambda editable: None,
) -> None:
    """Search around `editable`, changing it, and offer every better one."""
    rng = random.Random(seed)
    unit = unit_price(editable)
    idle, editable.work = 0, 0
    for _ in range(limits.rounds):
        if stop() or idle >= limits.patience or editable.work > limits.work or _is_best(editable, budget):
            return
        idle = 0 if _round(editable, budget, rng, unit, stop) else idle + 1
        if not idle:
            offer(editable)


def _is_best(editable: EditableSchedule, budget: int) -> bool:
    return editable.peak <= budget and editable.extra_time <= 0


def _round(editable: EditableSchedule, budget: int, rng: random.Random, unit: float, stop: Callable[[], bool]) -> bool:
    before, mark = _score(editable, budget), len(editable.journal)
    for key in _pick(editable, rng):
        editable.remove(key)
    noise = rng.choice((0.0, 0.2, 0.5, 1.0))
    factors = [rng.lognormvariate(0.0, noise) for _ in range(editable.flat.count)] if noise else None
    rule = EvictionRule(
        price=unit * 10 ** rng.uniform(-1.5, 1.5),
        weight=factors.__getitem__ if factors else None,
        bold=rng.random() < 0.5,
        early=rng.random() < 0.2,
    )
    fits = evict(editable, budget, rule, stop=stop, max_steps=MAX_GROWTH_FACTOR * editable.flat.count)
    if fits:
        prune(editable, budget, weight=rule.weight)
    if _score(editable, budget) < (before[0], before[1] * (1 - 1e-9)):
        editable.journal.clear()
        return True
    editable.rewind(mark)
    return False


def _score(editable: EditableSchedule, budget: int) -> tuple[int, float]:
    """Bytes over the budget first, then extra time."""
    return max(editable.peak - budget, 0), editable.extra_time


def _pick(editable: EditableSchedule, rng: random.Random) -> list[int]:
    """Recomputations to undo: those of a window of stages, of a window of ops, or a random share."""
    extra, count = editable.extra_steps(), editable.flat.count
    if not extra:
        return []
    kind, share = rng.random(), rng.choice((0.05, 0.1, 0.2, 0.4))
    centre, width = rng.choice(extra), max(1, int(share * count / 2))
    if kind < 0.4:
        return [key for key in extra if abs(key // count - centre // count) <= width]
    if kind < 0.7:
        return [key for key in extra if abs(key % count - centre % count) <= width]
    return [key for key in extra if rng.random() < share or key == centre]
