"""Remat for Keras 3: a compiled model and a memory budget in, the same model out, whose `fit` stays within it.

    model = remat.keras.optimize(model, budget="0.6x")
    model.fit(x, y)

or `model.fit(x, y, callbacks=[remat.keras.Remat("0.6x")])`. Each backend is one file: on JAX the trainer's stateless
loss is planned, on PyTorch the step is followed while it runs. Importing this package does not import keras.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from remat.errors import MissingExtra

if TYPE_CHECKING:
    from remat.keras.callback import BudgetCallback as Remat
    from remat.keras.training import optimize, state_of

__all__ = ["Remat", "optimize", "state_of"]

_PLACES = {
    "Remat": ("remat.keras.callback", "BudgetCallback"),
    "optimize": ("remat.keras.training", "optimize"),
    "state_of": ("remat.keras.training", "state_of"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'remat.keras' has no attribute {name!r}")
    import importlib

    module, attribute = _PLACES[name]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "keras":
            raise
        raise MissingExtra(f"remat.keras.{name} needs Keras 3; install `remat[keras]`.") from error


def __dir__() -> list[str]:
    return sorted(__all__)
