"""Everything Remat raises on purpose.

    RematError
    ├── BudgetError            a budget that cannot be parsed or does not make sense
    ├── InfeasibleBudget       a budget below the smallest feasible one (carries `min_budget`)
    ├── FileFormatError        a damaged, truncated or foreign file
    ├── InvalidGraph           a cyclic, dangling or otherwise impossible graph
    ├── InvalidSchedule        a schedule that breaks a rule of its problem
    ├── InvalidLayout          buffers that make no sense, or a placement in which two of them overlap
    ├── InfeasibleLayout       a capacity below every placement that is known (carries `height`)
    ├── UnknownName            a solver, model or target that does not exist
    ├── MissingExtra           an optional library that is not installed
    ├── PlanMismatch           a plan made for another model, torch, device or shape
    ├── CaptureError           a computation that cannot be captured
    ├── OffloadFailed          host memory or a disk that cannot take, or give back, what was to be offloaded
    ├── RanksDiffer            ranks that are to train together and are about to train different things
    ├── RankLost               a rank that ended or stopped while all of them planned
    ├── ProfileStopped         a step that did not come to its end while it was profiled (carries `profile`)
    └── VerificationError      two runs that should give the same bits and do not

A message says what was asked, what was found, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat.core.results.profile import StepProfile


class RematError(Exception):
    """Base of every error Remat raises on purpose."""

    exit_code = 1


class BudgetError(RematError):
    """A budget that cannot be parsed or does not make sense."""

    exit_code = 2


class InfeasibleBudget(RematError):
    """No schedule fits the budget; `min_budget` is the smallest known feasible one."""

    exit_code = 3

    def __init__(self, message: str, min_budget: int) -> None:
        super().__init__(message)
        self.min_budget = min_budget


class FileFormatError(RematError):
    """A damaged, truncated or foreign file."""


class InvalidGraph(RematError):
    """A cyclic, dangling or otherwise impossible graph."""


class InvalidSchedule(RematError):
    """A schedule that breaks a rule of its problem."""


class InvalidLayout(RematError):
    """Buffers that make no sense, or a placement in which two of them overlap."""


class InfeasibleLayout(RematError):
    """No placement is known that fits the capacity; `height` is that of the lowest one found."""

    exit_code = 3

    def __init__(self, message: str, height: int) -> None:
        super().__init__(message)
        self.height = height


class UnknownName(RematError):
    """A solver, model or target that does not exist."""

    exit_code = 2


class MissingExtra(RematError):
    """An optional library that is not installed."""


class PlanMismatch(RematError):
    """A plan made for another model, torch, device or shape."""


class CaptureError(RematError):
    """A computation that cannot be captured."""


class OffloadFailed(RematError):
    """Host memory or a disk that cannot take, or give back, what was to be offloaded."""


class RanksDiffer(RematError):
    """Ranks that are to train together and are about to train different things."""


class RankLost(RematError):
    """A rank that ended or stopped while all of them planned."""


class ProfileStopped(RematError):
    """A step that did not come to its end; `profile` is what was learnt until then."""

    def __init__(self, message: str, profile: StepProfile) -> None:
        super().__init__(message)
        self.profile = profile


class VerificationError(RematError):
    """Two runs that should give the same bits and do not."""

    exit_code = 4
