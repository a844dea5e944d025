"""Remat trains a model that does not fit: give it a PyTorch model and a memory budget in bytes.

    model = remat.optimize(model, budget="20GiB")

`remat.jax` does the same for JAX. Importing this package imports neither torch, jax nor a solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.core.results.diagnosis import Diagnosis
from remat.core.results.estimate import Estimate
from remat.core.results.max_batch import MaxBatch
from remat.core.results.pareto import Pareto
from remat.core.results.plan import Plan
from remat.core.results.profile import StepProfile
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
    OffloadFailed,
    PlanMismatch,
    ProfileStopped,
    RankLost,
    RanksDiffer,
    RematError,
    UnknownName,
    VerificationError,
)

if TYPE_CHECKING:
    from remat.fit.found import fit
    from remat.pytorch.batches.sampler import MaxTokensSampler
    from remat.pytorch.batches.sizer import BatchSizer
    from remat.pytorch.estimate.estimate_step import estimate
    from remat.pytorch.explore.max_batch import max_batch_size
    from remat.pytorch.explore.pareto import pareto
    from remat.pytorch.guard.guarded import guarded
    from remat.pytorch.host.optimizer import offload_optimizer
    from remat.pytorch.measure.doctor import doctor
    from remat.pytorch.measure.measure_step import Measurement, measure
    from remat.pytorch.measure.profile_step import profile
    from remat.pytorch.measure.verify import Verification, verify
    from remat.pytorch.online.dtr import dtr
    from remat.pytorch.run.capped import capped
    from remat.pytorch.run.optimize import apply, optimize, plan, plan_of, set_budget

__version__ = "0.1.0"

__all__ = [
    "BatchSizer",
    "BudgetError",
    "CaptureError",
    "Diagnosis",
    "Estimate",
    "FileFormatError",
    "InfeasibleBudget",
    "InfeasibleLayout",
    "InvalidGraph",
    "InvalidLayout",
    "InvalidSchedule",
    "MaxBatch",
    "MaxTokensSampler",
    "Measurement",
    "MissingExtra",
    "OffloadFailed",
    "Pareto",
    "Plan",
    "PlanMismatch",
    "ProfileStopped",
    "RankLost",
    "RanksDiffer",
    "RematError",
    "StepProfile",
    "UnknownName",
    "Verification",
    "VerificationError",
    "apply",
    "capped",
    "doctor",
    "dtr",
    "estimate",
    "fit",
    "guarded",
    "max_batch_size",
    "measure",
    "offload_optimizer",
    "optimize",
    "pareto",
    "plan",
    "plan_of",
    "profile",
    "set_budget",
    "verify",
]

_TORCH = {
    "apply": "remat.pytorch.run.optimize",
    "capped": "remat.pytorch.run.capped",
    "doctor": "remat.pytorch.measure.doctor",
    "dtr": "remat.pytorch.online.dtr",
    "estimate": "remat.pytorch.estimate.estimate_step",
    "guarded": "remat.pytorch.guard.guarded",
    "max_batch_size": "remat.pytorch.explore.max_batch",
    "offload_optimizer": "remat.pytorch.host.optimizer",
    "optimize": "remat.pytorch.run.optimize",
    "pareto": "remat.pytorch.explore.pareto",
    "plan": "remat.pytorch.run.optimize",
    "plan_of": "remat.pytorch.run.optimize",
    "profile": "remat.pytorch.measure.profile_step",
    "set_budget": "remat.pytorch.run.optimize",
    "BatchSizer": "remat.pytorch.batches.sizer",
    "MaxTokensSampler": "remat.pytorch.batches.sampler",
    "Measurement": "remat.pytorch.measure.measure_step",
    "measure": "remat.pytorch.measure.measure_step",
    "Verification": "remat.pytorch.measure.verify",
    "verify": "remat.pytorch.measure.verify",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("fit", "jax", "keras"):
        return importlib.import_module(f"remat.{name}")
    if name not in _TORCH:
        raise AttributeError(f"module 'remat' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtra(f"remat.{name} needs PyTorch; install `remat[torch]`.") from error


def __dir__() -> list[str]:
    return sorted(__all__)
