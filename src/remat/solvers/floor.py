"""The smallest peak we know how to reach.

In: a problem, its budget ignored. Out: a tape squeezed as far as it goes: whatever is idle at the peak is dropped and
computed again on demand, over and over, for a few ways of choosing between keeping and recomputing inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from remat.core.problem import Problem, floor_bytes
from remat.solvers.evict import Taste, evict
from remat.solvers.tape import Tape

PRICES = (0.3, 3.0, 30.0)
"""Worth of a byte across the peak, in units of the plain step's time per byte of its peak."""
GROWTH = 6
"""A squeezed schedule has at most this many times the steps of the plain one."""
MAX_TRIES, TRIES_TIMES_OPS = 20, 600


def min_budget(problem: Problem) -> int:
    """The smallest budget for which a schedule is known."""
    return squeeze(problem).peak


def squeeze(problem: Problem, target: int = 0, stop: Callable[[], bool] = lambda: False) -> Tape:
    """The tape with the smallest peak found; stops early once the peak is within `target`."""
    goal = max(floor_bytes(problem)[0], target)
    best = Tape(problem)
    for taste in _tastes(best):
        if best.peak <= goal or stop():
            break
        tape = Tape(problem)
        evict(tape, goal, taste, stop=stop, max_steps=GROWTH * tape.shape.count)
        if tape.peak < best.peak:
            best = tape
    return best


def _tastes(plain: Tape) -> Iterator[Taste]:
    """A few prices, then random choices: many for small graphs, none for large ones."""
    unit, count = unit_price(plain), plain.shape.count
    for price in PRICES:
        yield Taste(price=price * unit)
    rng = random.Random(0)
    for number in range(min(MAX_TRIES, TRIES_TIMES_OPS // max(count, 1))):
        factors = [rng.lognormvariate(0.0, 0.7) for _ in range(count)]
        price = unit * 10 ** rng.uniform(-1.0, 2.0)
        yield Taste(price=price, weight=factors.__getitem__, bold=number % 2 == 1)


def unit_price(tape: Tape) -> float:
    """The plain step's time per byte of its peak: the scale on which bytes and seconds are traded."""
    return sum(tape.shape.time) / max(tape.peak, 1)
