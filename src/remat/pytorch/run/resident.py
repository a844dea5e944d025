"""Whoever holds the step's resident memory: its modules, their gradients, and their optimizers' state.

Adam's state does not exist before its first step, yet it will be there in every later one: it is reserved from the
start, found by letting the same optimizer take a step on parameters of two elements.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from remat.pytorch.device import storage_bytes
from remat.pytorch.reach import Reachable, reachable_from, reachable_optimizers


class ResidentMemory:
    """The memory of one step that is there before it starts."""

    def __init__(self, step: Any = None, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._step = step
        self._given = tuple(optimizers)
        self._parameters: tuple[torch.Tensor, ...] | None = None

    def forget(self) -> None:
        """Let go of the step: Dynamo keeps what it compiled, and the session with it, while the process runs."""
        self._step, self._given, self._parameters = None, (), None

    def resident_bytes(self, device: torch.device) -> dict[str, int]:
        """By class; optimizer state counts as it will be after the first optimizer step."""
        optimizers = self.optimizers()
        parts = self._reachable(optimizers).bytes_by_class(device)
        parts["optimizer state"] += sum(pending_state_bytes(optimizer, device) for optimizer in optimizers)
        return parts

    def device(self) -> torch.device:
        return self._reachable().device()

    def present_bytes(self, device: torch.device) -> int:
        """What is there now: without optimizer state that is still to come."""
        return self._reachable().total_bytes(device)

    def has_gradients(self) -> bool:
        """Whether an earlier backward left gradients, which this step's will be added to."""
        if self._parameters is None:
            found = reachable_from(self._step).tensors["parameters"].values()
            self._parameters = tuple(parameter for parameter in found if parameter.requires_grad)
        return any(parameter.grad is not None for parameter in self._parameters)

    def addresses(self) -> set[int]:
        return {address for members in self._reachable().tensors.values() for address in members}

    def given(self, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[int, int]:
        """Addresses and bytes of what the step can reach besides: arguments, tensors that its function names."""
        found = reachable_from(self._step, args, kwargs)
        device = found.device()
        return {address: storage_bytes(tensor, device) for address, tensor in found.tensors["inputs"].items()}

    def blocks_given(self, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[int, tuple[int, int]]:
        """The same with where the bytes are, too."""
        found = reachable_from(self._step, args, kwargs)
        device = found.device()
        return {
            address: (storage_bytes(tensor, device), int(tensor.untyped_storage().data_ptr()))
            for address, tensor in found.tensors["inputs"].items()
        }

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those given, or else every optimizer alive that updates one of the step's parameters."""
        if self._given:
            return list(self._given)
        parameters = {id(parameter) for parameter in reachable_from(self._step).tensors["parameters"].values()}
        found = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
        return [
            optimizer for optimizer in found if any(id(parameter) in parameters for parameter in _updated(optimizer))
        ]

    def optimizers_of_step(self) -> list[torch.optim.Optimizer]:
        """Optimizers that the step itself may call: none for a module."""
        if isinstance(self._step, nn.Module) or self._step is None:
            return []
        return list({id(item): item for item in (*self._given, *reachable_optimizers(self._step))}.values())

    def _reachable(self, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> Reachable:
        """From the step and its optimizers, which are looked for where they are not known."""
        roots: list[Any] = [self._step, *(self.optimizers() if optimizers is None else optimizers)]
        # Inputs are counted by the graphs that take them; here only what outlives a step.
        found = reachable_from(roots)
        found.tensors["inputs"] = {}
        return found


def pending_state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """State the optimizer will create at its next step, for parameters that have none yet."""
    pending = [parameter for parameter in _updated(optimizer) if not optimizer.state.get(parameter)]
    if not pending:
        return 0
    like, fixed = _state_shape(optimizer)
    return sum(
        like * storage_bytes(parameter, device) + (fixed if device.type == "cpu" else 0) for parameter in pending
    )


def _updated(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.requires_grad)


def _state_shape(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """(tensors as large as the parameter, bytes of everything else) that one parameter's state takes."""
    trial = nn.Parameter(torch.zeros(2))
    trial.grad = torch.ones(2)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    options |= {name: False for name in ("fused", "capturable") if name in options}
    # A state of the same class on two elements: cheap, and right for optimizers nobody has heard of.
    copy = type(optimizer)([trial], **options)
    copy.step()
    state = [tensor for tensor in copy.state[trial].values() if isinstance(tensor, torch.Tensor)]
    like = sum(tensor.shape == trial.shape for tensor in state)
    return like, sum(tensor.untyped_storage().nbytes() for tensor in state if tensor.shape != trial.shape)
