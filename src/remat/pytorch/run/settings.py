"""What the user asked for, and the two ways in which a step may end before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import Budget, BudgetScope
from remat.core.results.plan import Plan
from remat.errors import RematError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    budget: Budget | None
    solver: str = "auto"
    time_limit_s: float = 10.0
    seed: int = 0
    plan: Plan | None = None
    """A plan made before, to be run as it is."""
    counts: BudgetScope = BudgetScope.LIVE
    """What the budget bounds."""
    search_s: float = 0.0
    """Seconds in which compiled candidates may be timed against each other."""
    stop_after_capture: bool = False
    stop_after_plan: bool = False
    show_progress: bool | None = None


class CaptureReady(RematError):
    """Raised instead of running the step when only its first graph is wanted."""


class PlanReady(RematError):
    """Raised instead of running the step when only its plan is wanted."""
