"""`remat.keras.Remat`: the budget as a callback of `model.fit`.

In: the model that `fit` hands to its callbacks before it makes its training function. Out: the model within a budget.
"""

from __future__ import annotations

from typing import Any

import keras

from remat.keras.training import optimize


class BudgetCallback(keras.callbacks.Callback):
    """Train within `budget`; the options are those of `remat.keras.optimize`."""

    def __init__(self, budget: str | float, **options: Any) -> None:
        super().__init__()
        self.budget, self.options = budget, options
        self.attached: Any = None

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if self.attached is not model:
            self.attached = optimize(model, self.budget, **self.options)
