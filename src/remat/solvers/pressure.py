"""Evict only where memory is short: at the highest peak, drop what is idle there, then go to the next peak.

A dropped value is computed again just in time, from inputs that are kept across the peak or computed again too; which
of the two depends on what a byte is worth there, and several prices are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.evict import GROWTH, PRICES, Taste, evict, unit_price
from remat.solvers.tape import Tape

WORK = 60_000
"""Work on a tape after which an attempt ends: about a second."""


@final
@dataclass(frozen=True, slots=True)
class Pressure(Strategy):
    name: str = "pressure"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        for price in (0.0, *PRICES):
            tape = Tape(problem)
            taste, stop = Taste(price * unit_price(tape)), partial(_spent, tape)
            evict(tape, problem.budget_bytes, taste, stop=stop, max_steps=GROWTH * tape.shape.count)
            yield tape.schedule()


def _spent(tape: Tape) -> bool:
    return tape.work > WORK
