"""What a solver returns: a schedule, how good it is, and what was proven about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from remat.core.schedule import Schedule


class Status(Enum):
    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"


@dataclass(frozen=True, slots=True)
class Solution:
    """`schedule` is None only where `status` is INFEASIBLE.

    INFEASIBLE says that this solver found no schedule that fits; `min_budget_bytes` is then the smallest
    peak it can reach.
    """

    status: Status
    schedule: Schedule | None
    time_ns: float
    peak_bytes: int
    bound_ns: float
    """No schedule within the budget is faster than this, with first computations in the order that was solved: the
    graph's, or the one of the schedule where ops were moved before."""
    min_budget_bytes: int
    """The smallest budget for which a schedule is known."""
    solver: str
    reason: str = ""
    """Why the solver stopped, as a sentence."""

    @property
    def gap(self) -> float:
        """The share of the time that a perfect schedule could still save."""
        return max(0.0, (self.time_ns - self.bound_ns) / self.time_ns) if self.time_ns > 0 else 0.0
