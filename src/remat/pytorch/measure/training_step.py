"""One training step of a model as a function: forward, loss-like backward, optimizer, gradients dropped.

In: a model with its batch, and an optimizer or autocast's precision where wanted. Out: a callable without arguments
that `profile`, `measure` and an estimate run alike. Whatever has no loss to go backward from is refused in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.errors import RematError, UnknownName
from remat.pytorch.costs.plain_peak import loss_like
from remat.pytorch.reach import tensors_within

PRECISIONS: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
_LEARNING_RATE = 1e-4
_OPTIMIZERS: Mapping[str, tuple[type[Optimizer], dict[str, Any]]] = MappingProxyType(
    {
        "adamw": (torch.optim.AdamW, {}),
        "adam": (torch.optim.Adam, {}),
        "sgd": (torch.optim.SGD, {}),
        "momentum": (torch.optim.SGD, {"momentum": 0.9}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "adafactor": (torch.optim.Adafactor, {}),
    }
)


# No slots: what the step can reach is found through the attributes of the object.
@dataclass(frozen=True)
class TrainingStep:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    precision: torch.dtype | None = None
    """What autocast computes in; None is no autocast."""

    def __call__(self) -> None:
        with self._autocast():
            outputs = self.model(*self.args, **self.kwargs)
        roots = self._roots(outputs)
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        del roots, outputs
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        devices = {tensor.device.type for tensor in (*self.model.parameters(), *self.model.buffers())}
        return torch.autocast("cuda" if "cuda" in devices else "cpu", self.precision)

    def _roots(self, outputs: Any) -> list[torch.Tensor]:
        tensors = list(tensors_within(outputs))
        name = type(self.model).__name__
        if not tensors:
            raise RematError(
                f"{name} returned {type(outputs).__name__}, in which there is no tensor to go backward from; "
                "return the loss."
            )
        roots = loss_like(tensors)
        if not roots:
            raise RematError(
                f"Nothing that {name} returned has a gradient; return a loss that depends on parameters with "
                "requires_grad=True, outside of torch.no_grad()."
            )
        return roots


def make_optimizer(name: str, model: nn.Module) -> Optimizer | None:
    """An optimizer by its name, as PyTorch makes it by default; None for "none"."""
    if name == "none":
        return None
    if name not in _OPTIMIZERS:
        raise UnknownName(f"No optimizer is called {name!r}; choose one of none, {', '.join(_OPTIMIZERS)}.")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise RematError(f"{type(model).__name__} has no parameter that requires a gradient; {name} has nothing to do.")
    kind, options = _OPTIMIZERS[name]
    return kind(parameters, lr=_LEARNING_RATE, **options)


def precision_of(name: str) -> torch.dtype | None:
    """Autocast's dtype by its short name; None for "none"."""
    if name == "none":
        return None
    if name not in PRECISIONS:
        raise UnknownName(f"No precision is called {name!r}; choose one of none, {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]
