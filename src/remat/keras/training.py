"""`remat.keras.optimize`: the training step of a Keras model within a budget, whatever backend runs it.

In: a compiled model. Out: the same object, whose `fit` and `train_on_batch` keep to the budget; `evaluate` and
`predict` run as before. What was done is told by `state_of`.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import keras

from remat.core.budget import Budget, parse_budget
from remat.errors import RematError


class BudgetedStep(Protocol):
    """What became of a model's training step."""

    @property
    def budget_bytes(self) -> int | None:
        """None before the first step of a budget that is a share of the plain one."""
        ...

    @property
    def peak_bytes(self) -> int | None:
        """What the last step needed, or the plan predicts; None before the first."""
        ...

    def detach(self) -> None:
        """Train as before."""
        ...


_states: WeakKeyDictionary[Any, BudgetedStep] = WeakKeyDictionary()


def optimize(model: Any, budget: str | float, *, solver: str = "auto", time_limit_s: float = 4.0, seed: int = 0) -> Any:
    """`model`, a compiled Keras model, trained within `budget`: bytes, "2GiB", or "0.6x" of what a plain step makes.

    On JAX, bytes bound arguments, results and temporaries of forward and backward; on PyTorch, what the step makes. A
    second call replaces the budget of the first.
    """
    asked = parse_budget(budget)
    if not isinstance(model, keras.Model):
        raise RematError(f"remat.keras.optimize takes a Keras model; it was given a {type(model).__name__}.")
    if not model.compiled:
        raise RematError("The model has no loss yet; call model.compile before remat.keras.optimize.")
    if model in _states:
        _states[model].detach()
    _states[model] = _attach(model, asked, solver, time_limit_s, seed)
    # `fit` makes its training function anew, from the step as it is now.
    model.train_function = None
    return model


def state_of(model: Any) -> BudgetedStep:
    """What became of the model's step; refused where it was not optimized."""
    if model not in _states:
        raise RematError("state_of takes a model that remat.keras.optimize was given; this one was not.")
    return _states[model]


def _attach(model: Any, budget: Budget, solver: str, time_limit_s: float, seed: int) -> BudgetedStep:
    backend = keras.backend.backend()
    if backend == "jax":
        from remat.keras.on_jax import PlannedLoss

        return PlannedLoss.attach(model, budget, solver, time_limit_s, seed)
    if backend == "torch":
        from remat.keras.on_torch import FollowedStep

        return FollowedStep.attach(model, budget)
    if backend == "tensorflow":
        from remat.keras.layers.planning import SolverWishes
        from remat.keras.on_tensorflow import PlannedLayers

        return PlannedLayers.attach(model, budget, SolverWishes(solver, time_limit_s, seed))
    raise RematError(
        f"Keras runs on {backend} here, which Remat does not plan; set KERAS_BACKEND to jax, torch or tensorflow."
    )
