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
from remat.solvers.schedule.editable import EditableSchedule
from remat.solvers.schedule.evict import MAX_GROWTH_FACTOR, PRICES, EvictionRule, evict, unit_price

ATTEMPT_WORK = 60_000
"""Work on an editable schedule after which an attempt ends: about a second."""


@final
@dataclass(frozen=True, slots=True)
class Pressure(Strategy):
    name: str = "pressure"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        for price in (0.0, *PRICES):
            editable = EditableSchedule(problem)
            rule, stop = EvictionRule(price * unit_price(editable)), partial(_spent, editable)
            evict(editable, problem.budget_bytes, rule, stop=stop, max_steps=MAX_GROWTH_FACTOR * editable.flat.count)
            yield editable.schedule()


def _spent(editable: EditableSchedule) -> bool:
    return editable.work > ATTEMPT_WORK
