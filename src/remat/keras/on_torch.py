"""Keras on PyTorch: a step that is followed while it runs.

torch.compile cannot trace through Keras's layers, so that there is no graph to plan. `remat.dtr` keeps the step within
its budget all the same: tensors that are cheap to make again are given up when memory runs short. For that, nothing
else may hold them, so functional models let go of what their layers made. A budget that is a share is one of the first
step, which runs as it is.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from remat.core.budget import Budget, BudgetUnit
from remat.core.problem import LARGEST_BYTES
from remat.keras.letting_go import letting_go
from remat.pytorch.online.dtr import dtr


@dataclass(slots=True)
class FollowedStep:
    model: Any
    budget: Budget
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    """Of what the last step made."""
    plain_peak_bytes: int | None = None
    """Of what the first step made, which ran without a limit; None where the budget was given in bytes."""

    @staticmethod
    def attach(model: Any, budget: Budget) -> FollowedStep:
        state = FollowedStep(model, budget)
        if budget.unit is BudgetUnit.BYTES:
            state.budget_bytes = int(budget.amount)
        plain = model.train_step

        def train_step(data: Any) -> Any:
            with nullcontext() if state.is_measuring else letting_go(model), dtr(state.limit()) as online:
                logs = plain(data)
            state.note(online.peak_bytes)
            return logs

        model.train_step = train_step
        return state

    @property
    def is_measuring(self) -> bool:
        """Whether the next step runs as it is, to know what a plain one makes."""
        return self.budget.unit is BudgetUnit.PLAIN_FRACTION and self.budget_bytes is None

    def limit(self) -> int | str:
        if self.budget.unit is BudgetUnit.DEVICE_FRACTION:
            return f"{100 * self.budget.amount}%"
        return LARGEST_BYTES // 2 if self.budget_bytes is None else self.budget_bytes

    def note(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        if self.is_measuring:
            self.plain_peak_bytes = peak_bytes
            self.budget_bytes = int(self.budget.amount * peak_bytes)

    def detach(self) -> None:
        vars(self.model).pop("train_step", None)
