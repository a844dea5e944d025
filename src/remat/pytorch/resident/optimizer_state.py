"""How many bytes of state an optimizer will make at its first step: they are reserved before they exist.

The same optimizer takes a step on a small parameter, and each tensor of the state that this makes is scaled to the
real ones by the dimensions that the two have in common: right for optimizers nobody has heard of, whether their state
is as large as a parameter, quantized, or a row and a column of it.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import nn

from remat.pytorch.device import rules_of, storage_bytes
from remat.pytorch.host.optimizer import OffloadedSteps
from remat.pytorch.reach import dense_parts, tensors_within

_SMALL = {1: (8192,), 2: (512, 256)}
"""Sizes of a small parameter by its dimensions: enough for optimizers that leave the smallest ones unquantized."""
_REST = 4
"""Of every further dimension."""
_LIKE_ADAM = 2
"""Tensors as large as the parameter, where a step cannot be tried."""


def updated_parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def pending_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """State on `device` that the optimizer will make at its next step, for parameters that have none yet."""
    if isinstance(optimizer, OffloadedSteps):
        return 0
    total = 0
    known: dict[Any, _StateLaw] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                # Of what is spread over ranks, state is made for the part that this one holds.
                held = next(iter(dense_parts(parameter)), parameter)
                trial = _trial_shape(held.shape)
                key = (number, trial, held.dtype, held.device)
                if key not in known:
                    known[key] = _StateLaw(optimizer, number, held, trial)
                total += known[key].bytes_of(held, device)
    return total


class _StateLaw:
    """The state of one small parameter, and from it that of real ones."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: int, like: torch.Tensor, shape: tuple[int, ...]
    ) -> None:
        self._shape = shape
        self._state: list[torch.Tensor] | None
        try:
            self._state = _state_after_a_step(optimizer, group, like, shape)
        except Exception as error:  # anybody's code may raise anything, and none of it may stop a training step
            self._state = None
            warnings.warn(
                f"The state of {type(optimizer).__name__} cannot be tried on a small parameter "
                f"({type(error).__name__}: {error}); it is taken to be {_LIKE_ADAM} times as large as the parameters.",
                stacklevel=2,
            )

    def bytes_of(self, parameter: torch.Tensor, device: torch.device) -> int:
        if self._state is None:
            return _LIKE_ADAM * storage_bytes(parameter, device)
        return sum(
            rules_of(device).rounded(int(part.untyped_storage().nbytes() * self._scale(tensor, parameter)))
            for tensor in self._state
            for part in dense_parts(tensor)
            if part.device.type == device.type
        )

    def _scale(self, tensor: torch.Tensor, parameter: torch.Tensor) -> float:
        """How much larger it will be; dimensions that are not the parameter's stay as they are."""
        if tensor.shape == self._shape:
            return parameter.numel() / max(1, prod(self._shape))
        places = [self._shape.index(size) for size in tensor.shape if size > 1 and size in self._shape]
        return prod(parameter.shape[place] / self._shape[place] for place in places)


def _trial_shape(shape: torch.Size) -> tuple[int, ...]:
    """Small, with different sizes where the real ones differ, so that it can be told which is which."""
    most = _SMALL[1] if len(shape) == 1 else (*_SMALL[2], *[_REST] * len(shape))
    small = [min(size, limit) for size, limit in zip(shape, most, strict=False)]
    if len(small) > 1 and small[0] == small[1] and shape[0] != shape[1]:
        larger = int(shape[1] > shape[0])
        small[larger] //= 2
    return tuple(small)


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: int, like: torch.Tensor, shape: tuple[int, ...]
) -> list[torch.Tensor]:
    trial = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    trial.grad = torch.ones_like(trial)
    twin = object.__new__(type(optimizer))
    # All that makes the optimizer what it is, without its state and its parameters.
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**optimizer.param_groups[group], "params": [trial]}]
    with torch.no_grad():
        # Unwrapped, it tells nobody who listens to its steps.
        inspect.unwrap(type(optimizer).step)(twin)
    return list(tensors_within(dict(twin.state[trial])))
