"""The smallest peak we know how to reach.

In: a problem, its budget ignored. Out: a tape squeezed as far as it goes: whatever is idle at the peak is dropped and
computed again on demand, over and over, for a few ways of choosing between keeping and recomputing inputs.
"""

from __future__ import annotations

from collections.abc import Callable

from remat.core.problem import Problem, floor_bytes
from remat.solvers.evict import Taste, evict
from remat.solvers.tape import Tape

PRICES = (0.3, 3.0, 30.0)
"""Worth of a byte across the peak, in units of the plain step's time per byte of its peak."""
GROWTH = 6
"""A squeezed schedule has at most this many times the steps of the plain one."""


def min_budget(problem: Problem) -> int:
    """The smallest budget for which a schedule is known."""
    return squeeze(problem).peak


def squeeze(problem: Problem, target: int = 0, stop: Callable[[], bool] = lambda: False) -> Tape:
    """The tape with the smallest peak found; stops early once the peak is within `target`."""
    goal = max(floor_bytes(problem)[0], target)
    best = Tape(problem)
    for price in PRICES:
        tape = Tape(problem)
        evict(tape, goal, Taste(price=price * unit_price(tape)), stop=stop, max_steps=GROWTH * tape.shape.count)
        if tape.peak < best.peak:
            best = tape
        if best.peak <= goal or stop():
            break
    return best


def unit_price(tape: Tape) -> float:
    """The plain step's time per byte of its peak: the scale on which bytes and seconds are traded."""
    return sum(tape.shape.time) / max(tape.peak, 1)
