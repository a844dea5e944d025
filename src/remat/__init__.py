"""Remat trains a model that does not fit: give it a PyTorch model and a memory budget in bytes.

    model = remat.optimize(model, budget="20GiB")

Importing this package imports neither torch nor a solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.core.estimate import Estimate
from remat.core.max_batch import MaxBatch
from remat.core.pareto import Pareto
from remat.core.plan import Plan
from remat.core.profile import StepProfile
from remat.errors import (
    BudgetError,
    CaptureError,
    FileFormatError,
    InfeasibleBudget,
    InfeasibleLayout,
    InvalidGraph,
    InvalidLayout,
    InvalidSchedule,
    MissingExtra,
    PlanMismatch,
    ProfileStopped,
    RematError,
    UnknownName,
    VerificationError,
)

if TYPE_CHECKING:
    from remat.pytorch.capped import capped
    from remat.pytorch.estimate import estimate
    from remat.pytorch.max_batch import max_batch_size
    from remat.pytorch.optimize import apply, optimize, plan, plan_of, set_budget
    from remat.pytorch.pareto import pareto
    from remat.pytorch.profiling import profile
    from remat.pytorch.track import Measurement, measure
    from remat.pytorch.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CaptureError",
    "Estimate",
    "FileFormatError",
    "InfeasibleBudget",
    "InfeasibleLayout",
    "InvalidGraph",
    "InvalidLayout",
    "InvalidSchedule",
    "MaxBatch",
    "Measurement",
    "MissingExtra",
    "Pareto",
    "Plan",
    "PlanMismatch",
    "ProfileStopped",
    "RematError",
    "StepProfile",
    "UnknownName",
    "Verification",
    "VerificationError",
    "apply",
    "capped",
    "estimate",
    "max_batch_size",
    "measure",
    "optimize",
    "pareto",
    "plan",
    "plan_of",
    "profile",
    "set_budget",
    "verify",
]

_TORCH = {
    "apply": "remat.pytorch.optimize",
    "capped": "remat.pytorch.capped",
    "estimate": "remat.pytorch.estimate",
    "max_batch_size": "remat.pytorch.max_batch",
    "optimize": "remat.pytorch.optimize",
    "pareto": "remat.pytorch.pareto",
    "plan": "remat.pytorch.optimize",
    "plan_of": "remat.pytorch.optimize",
    "profile": "remat.pytorch.profiling",
    "set_budget": "remat.pytorch.optimize",
    "Measurement": "remat.pytorch.track",
    "measure": "remat.pytorch.track",
    "Verification": "remat.pytorch.verify",
    "verify": "remat.pytorch.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _TORCH:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(f"remat.{name} needs PyTorch; install `remat[torch]`.") from error


def __dir__() -> list[str]:
    return sorted(__all__)
