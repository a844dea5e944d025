"""Remat for JAX: a loss function and a memory budget in, a loss function that trains within it out.

    loss = remat.jax.optimize(loss, budget="8GiB")
    step = jax.jit(jax.value_and_grad(loss), compiler_options=remat.jax.compiler_options())

In: functions of pytrees of arrays. Out: functions, and the same plans as for PyTorch. Importing this package does not
import jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.errors import MissingExtra

if TYPE_CHECKING:
    from remat.jax.costs.compiled import StepMemory, compiler_options
    from remat.jax.exploring import pareto, profile
    from remat.jax.measuring import CompiledMeasurement, measure
    from remat.jax.optimized import Optimized, apply, optimize, plan, plan_of
    from remat.jax.policies.policy import ChosenPolicy, policy
    from remat.jax.verifying import GradientCheck, verify
    from remat.jax.whole import CompiledTraining, compile

__all__ = [
    "ChosenPolicy",
    "CompiledMeasurement",
    "CompiledTraining",
    "GradientCheck",
    "Optimized",
    "StepMemory",
    "apply",
    "compile",
    "compiler_options",
    "measure",
    "optimize",
    "pareto",
    "plan",
    "plan_of",
    "policy",
    "profile",
    "verify",
]

_PLACES = {
    "CompiledMeasurement": "remat.jax.measuring",
    "GradientCheck": "remat.jax.verifying",
    "Optimized": "remat.jax.optimized",
    "StepMemory": "remat.jax.costs.compiled",
    "apply": "remat.jax.optimized",
    "compiler_options": "remat.jax.costs.compiled",
    "optimize": "remat.jax.optimized",
    "plan": "remat.jax.optimized",
    "plan_of": "remat.jax.optimized",
    "measure": "remat.jax.measuring",
    "pareto": "remat.jax.exploring",
    "policy": "remat.jax.policies.policy",
    "ChosenPolicy": "remat.jax.policies.policy",
    "profile": "remat.jax.exploring",
    "verify": "remat.jax.verifying",
    "CompiledTraining": "remat.jax.whole",
    "compile": "remat.jax.whole",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'remat.jax' has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("jax", "jaxlib"):
            raise
        raise MissingExtra(f"remat.jax.{name} needs JAX; install `remat[jax]`.") from error


def __dir__() -> list[str]:
    return sorted(__all__)
