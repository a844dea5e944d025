"""Drop the activations with the most bytes per second of their own op first, as many as the budget asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.activations import Activations, activations_of, drop_in_order


@final
@dataclass(frozen=True, slots=True)
class BenefitCost(Strategy):
    name: str = "benefit_cost"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        found = activations_of(problem)
        yield from drop_in_order(problem, found, sorted(found.ops, key=lambda op: seconds_per_byte(found, op)))


def seconds_per_byte(activations: Activations, op: int) -> float:
    return activations.flat.time[op] / activations.held_bytes[op]
