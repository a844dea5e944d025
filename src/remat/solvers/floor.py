"""The smallest peak we know how to reach.

In: a problem, its budget ignored. Out: a tape squeezed as far as it goes: whatever is idle at the peak is dropped and
computed again on demand, over and over, for a few ways of choosing between keeping and recomputing inputs; then a
search around it for lower ones. The smallest feasible budget lies between the need of the largest op (`floor_bytes`)
and this peak.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.evict import GROWTH, PRICES, Taste, evict, unit_price
from remat.solvers.keep import drop_all_but, first_backward
from remat.solvers.overwrite import always_overwritten
from remat.solvers.search import SearchLimits, improve
from remat.solvers.strategies import keep_sets
from remat.solvers.tape import Tape

RANDOM_TRIES = 12
WORK = 100_000
"""Work on tapes after which a squeeze has to do with what it has: one or two seconds."""
LOWERING = SearchLimits(patience=150, work=50_000)


def min_budget(problem: Problem) -> int:
    """The smallest budget for which a schedule is known."""
    return simulate(problem, lowest_schedule(problem)).peak_bytes


def lowest_schedule(problem: Problem, stop: Callable[[], bool] = lambda: False, target: int = 0) -> Schedule:
    """The schedule with the smallest peak found, where ops may overwrite their inputs; see `lowest_tape`."""
    return lowest_tape(always_overwritten(problem), stop, target).schedule()


def lowest_tape(problem: Problem, stop: Callable[[], bool] = lambda: False, target: int = 0) -> Tape:
    """The tape with the smallest peak found; the same for every budget, unless stopped or once within `target`."""
    tape = squeeze(problem, target, stop)
    goal = max(floor_bytes(problem)[0], target)
    if tape.peak > goal or not target:
        improve(tape, goal, LOWERING, 0, lambda: stop() or tape.peak <= target)
    return tape


def squeeze(problem: Problem, target: int = 0, stop: Callable[[], bool] = lambda: False) -> Tape:
    """The tape with the smallest peak found; stops early once the peak is within `target`."""
    goal = max(floor_bytes(problem)[0], target)
    best = Tape(problem)
    work_left = WORK
    for taste, kept in _starts(problem, best):
        if best.peak <= goal or stop() or work_left <= 0:
            break
        tape = Tape(problem)
        if kept is not None:
            drop_all_but(tape, [kept], [first_backward(problem)])
        limit = min(work_left, WORK // 4)
        evict(tape, goal, taste, stop=partial(_spent, tape, limit, stop), max_steps=GROWTH * tape.shape.count)
        work_left -= tape.work
        if tape.peak < best.peak:
            best = tape
    return best


def _spent(tape: Tape, limit: int, stop: Callable[[], bool]) -> bool:
    return tape.work > limit or stop()


def _starts(problem: Problem, plain: Tape) -> Iterator[tuple[Taste, frozenset[int] | None]]:
    """How to choose, and what the schedule to begin with keeps: plain, then known strategies, then random choices."""
    unit, count = unit_price(plain), plain.shape.count
    for price in PRICES:
        yield Taste(price=price * unit), None
    for _, kept in keep_sets(problem):
        yield Taste(price=PRICES[1] * unit), kept
    rng = random.Random(0)
    for number in range(RANDOM_TRIES):
        factors = [rng.lognormvariate(0.0, 0.7) for _ in range(count)]
        price = unit * 10 ** rng.uniform(-1.0, 2.0)
        bold, early = number % 2 == 1, number % 4 >= 2
        yield Taste(price=price, weight=factors.__getitem__, bold=bold, early=early), None
