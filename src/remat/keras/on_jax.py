"""Keras on JAX: the trainer's stateless loss, planned like any other loss.

The trainer differentiates `compute_loss_and_updates` inside `jax.jit`; the planned function stands in its place while
it trains. Keras compiles with XLA's default options, so plans are made, and their memory is told, under these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remat.core.budget import Budget
from remat.core.results.plan import Plan
from remat.errors import CaptureError
from remat.jax.loop import Asked
from remat.jax.optimized import Optimized, plan_of
from remat.jax.planning import Wishes


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    model: Any
    planned: Optimized

    @staticmethod
    def attach(model: Any, budget: Budget, solver: str, time_limit_s: float, seed: int) -> PlannedLoss:
        plain = model.compute_loss_and_updates
        wishes = Wishes(budget, has_aux=True, asked=Asked(solver, time_limit_s, seed), options={})
        planned = Optimized(plain, wishes, (0,))

        def compute(*args: Any, training: bool = False, **kwargs: Any) -> Any:
            return (planned if training else plain)(*args, training=training, **kwargs)

        model.compute_loss_and_updates = compute
        return PlannedLoss(model, planned)

    def detach(self) -> None:
        vars(self.model).pop("compute_loss_and_updates", None)

    @property
    def plan(self) -> Plan:
        """The plan in use; made in the first step."""
        return plan_of(self.planned)

    @property
    def budget_bytes(self) -> int | None:
        found = self._known()
        return None if found is None else found.budget_bytes

    @property
    def peak_bytes(self) -> int | None:
        found = self._known()
        return None if found is None else found.predicted_peak

    def _known(self) -> Plan | None:
        try:
            return self.plan
        except CaptureError:
            return None
