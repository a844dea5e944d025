"""Large-neighbourhood search: undo part of a schedule, repair it with other choices, keep what is faster.

In: a tape and a budget. Out: faster tapes within the budget, or lower ones while it is still over the budget, offered
one by one. Each round removes the recomputations of a random window of stages or ops (or a random share of all),
which raises the peak, makes the tape fit again with randomly weighted times, and prunes. A round that does not help is
rewound. Rounds are counted, so that a seed gives one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from remat.solvers.evict import GROWTH, Taste, evict, unit_price
from remat.solvers.prune import prune
from remat.solvers.tape import Tape


@dataclass(frozen=True, slots=True)
class SearchLimits:
    rounds: int = 2000
    patience: int = 250
    """Rounds without improvement after which the search gives up."""
    work: int = 2_000_000
    """Work on the tape after which the search gives up."""


def improve(
    tape: Tape,
    budget: int,
    limits: SearchLimits,
    seed: int,
    stop: Callable[[], bool],
    offer: Callable[[Tape], object] = lambda tape: None,
) -> None:
    """Search around `tape`, changing it, and offer every better one."""
    rng = random.Random(seed)
    unit = unit_price(tape)
    idle, tape.work = 0, 0
    for _ in range(limits.rounds):
        if stop() or idle >= limits.patience or tape.work > limits.work or _is_best(tape, budget):
            return
        idle = 0 if _round(tape, budget, rng, unit, stop) else idle + 1
        if not idle:
            offer(tape)


def _is_best(tape: Tape, budget: int) -> bool:
    return tape.peak <= budget and tape.extra_time <= 0


def _round(tape: Tape, budget: int, rng: random.Random, unit: float, stop: Callable[[], bool]) -> bool:
    before, mark = _score(tape, budget), len(tape.journal)
    for key in _pick(tape, rng):
        tape.remove(key)
    noise = rng.choice((0.0, 0.2, 0.5, 1.0))
    factors = [rng.lognormvariate(0.0, noise) for _ in range(tape.shape.count)] if noise else None
    taste = Taste(
        price=unit * 10 ** rng.uniform(-1.5, 1.5),
        weight=factors.__getitem__ if factors else None,
        bold=rng.random() < 0.5,
        early=rng.random() < 0.2,
    )
    fits = evict(tape, budget, taste, stop=stop, max_steps=GROWTH * tape.shape.count)
    if fits:
        prune(tape, budget, weight=taste.weight)
    if _score(tape, budget) < (before[0], before[1] * (1 - 1e-9)):
        tape.journal.clear()
        return True
    tape.rewind(mark)
    return False


def _score(tape: Tape, budget: int) -> tuple[int, float]:
    """Bytes over the budget first, then extra time."""
    return max(tape.peak - budget, 0), tape.extra_time


def _pick(tape: Tape, rng: random.Random) -> list[int]:
    """Recomputations to undo: those of a window of stages, of a window of ops, or a random share."""
    extra, count = tape.extra_steps(), tape.shape.count
    if not extra:
        return []
    kind, share = rng.random(), rng.choice((0.05, 0.1, 0.2, 0.4))
    centre, width = rng.choice(extra), max(1, int(share * count / 2))
    if kind < 0.4:
        return [key for key in extra if abs(key // count - centre // count) <= width]
    if kind < 0.7:
        return [key for key in extra if abs(key % count - centre % count) <= width]
    return [key for key in extra if rng.random() < share or key == centre]
