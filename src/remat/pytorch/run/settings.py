"""What the user asked for, and the two ways in which a step may end before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from remat.core.budget import Budget, BudgetScope
from remat.core.results.plan import Plan
from remat.errors import RematError
from remat.pytorch.run.shapes.buckets import Bound


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
    mode: str | None = None
    """Of torch.compile."""
    stop_after_capture: bool = False
    stop_after_plan: bool = False
    show_progress: bool | None = None
    offload: str = ""
    """Where values may spend a while: "cpu", "cpu:64GiB", "disk:/a/folder"; empty for nowhere."""
    leaves_open: bool = False
    """Whether sizes that change may be left open."""
    bounds: tuple[Bound, ...] = ()
    """Sizes that will change, as declared."""
    raises_later: bool = False
    """Whether a budget that does not fit ends a training that has begun."""


class Allowance:
    """A budget in bytes, the same for every shape of a step.

    A share of the plain peak is one of the largest step so far: a smaller one may use as much.
    """

    def __init__(self) -> None:
        self._largest_bytes = 0
        self.latest_bytes = 0
        """As it was last resolved."""

    def of(self, budget: Budget, *, plain_peak_bytes: int, device_bytes: int) -> int:
        self._largest_bytes = max(self._largest_bytes, plain_peak_bytes)
        self.latest_bytes = budget.resolve(plain_peak_bytes=self._largest_bytes, device_bytes=device_bytes)
        return self.latest_bytes


ON_INFEASIBLE = ("go on", "raise")
"""What a step that has begun does where a later shape does not fit: its leanest plan, or raise."""


def parse_on_infeasible(text: str) -> bool:
    """Whether to raise in the middle of training."""
    if text not in ON_INFEASIBLE:
        known = " or ".join(map(repr, ON_INFEASIBLE))
        raise RematError(f"There is no on_infeasible={text!r}; write {known}.")
    return text == "raise"


class CaptureReady(RematError):
    """Raised instead of running the step when only its first graph is wanted."""


class PlanReady(RematError):
    """Raised instead of running the step when only its plan is wanted."""


class SizesMatter(RematError):
    """Raised where sizes cannot be left open: tracing starts over with those of the call."""
