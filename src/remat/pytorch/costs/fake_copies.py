"""A training step on fake tensors: the same modules and optimizer, whose tensors have shapes and no memory.

In: a model (real, on "meta" or fake already), its arguments, its optimizer. Out: copies of them in a fake mode of their
own, moved to the device asked for. Tensors that shared memory share it again; nothing of the user's is touched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from remat.errors import CaptureError
from remat.pytorch._compat.fakes import FakeTensorMode, on_storage
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.trees import tree_map


class FakeCopies:
    """Fake copies; the same object asked for twice gives the same copy.

    What lies on the device type `home` (or on "meta") goes to `device`, anything else stays where it is.
    """

    def __init__(self, home: str, device: torch.device) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._home, self._device = home, device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []
        """An identity in the memo must not be given out again."""

    def of_arguments(self, arguments: Any) -> Any:
        return tree_map(self._of_leaf, arguments)

    def of_model(self, model: nn.Module, without: Sequence[nn.Module] = ()) -> nn.Module:
        """A copy of the model; in place of the parts `without` stand modules that do nothing."""
        left_out = {id(part) for item in without for part in item.modules()}
        self._memo |= {id(item): nn.Identity() for item in without}
        for module in model.modules():
            for tensor in _members(module) if id(module) not in left_out else ():
                self._of_leaf(tensor)
        return self._copied(model, "model")

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for group in optimizer.param_groups:
            self.of_arguments(group["params"])
        self.of_arguments([list(state.values()) for state in optimizer.state.values()])
        return self._copied(optimizer, "optimizer")

    def _copied(self, item: Any, what: str) -> Any:
        with self.mode:
            try:
                return copy.deepcopy(item, self._memo)
            except Exception as error:
                reason = str(error).split("\n")[0]
                raise CaptureError(
                    f"The {what} {type(item).__name__} cannot be copied for an estimate "
                    f"({type(error).__name__}: {reason}); it must allow copy.deepcopy."
                ) from error

    def _of_leaf(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if id(item) not in self._memo:
            self._memo[id(item)] = self._fake(item)
            self._kept.append(item)
        return self._memo[id(item)]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.mode, torch.no_grad():
            device = self._device if tensor.device.type in ("meta", self._home) else tensor.device
            fake = on_storage(self._storage_of(tensor, device), tensor, device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

    def _storage_of(self, tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
        original = tensor.untyped_storage()
        key = storage_address(original)
        if key not in self._storages:
            flat = torch.empty(original.nbytes(), dtype=torch.uint8, device=device)
            self._storages[key] = flat.untyped_storage()
            self._kept.append(original)
        return self._storages[key]


def _members(module: nn.Module) -> Iterable[torch.Tensor]:
    """Parameters, buffers, and tensors that are neither."""
    loose = [item for item in vars(module).values() if isinstance(item, torch.Tensor)]
    return [*module.parameters(recurse=False), *module.buffers(recurse=False), *loose]
