"""The tensors a step can reach before it runs, by class: parameters, buffers, gradients, optimizer state, inputs.

In: a step (module, function, bound method, partial) and its arguments. Looked at: closures, defaults, the globals a
function names, containers, modules and optimizers. A tensor belongs to the first class that claims it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from remat.pytorch._compat.distributed import bucket_bytes, gathered_from, shards_of
from remat.pytorch._compat.tensors import (
    changes_gradients,
    gradient_hooks_of,
    inner_tensors,
    sparse_parts,
    storage_address,
)
from remat.pytorch.device import storage_bytes

_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "transformers"})
"""Code and objects of these hold no tensors of the step; walking into them would only take time."""
CLASSES = ("parameters", "buffers", "gradients", "optimizer state", "inputs")
BUCKETS = "buckets"
"""What gradients are copied into to be reduced over ranks; no tensor of Python's lies there."""


@dataclass(slots=True)
class Reachable:
    """Distinct storages by class."""

    tensors: dict[str, dict[int, torch.Tensor]] = field(default_factory=lambda: {name: {} for name in CLASSES})
    parameters: dict[int, torch.Tensor] = field(default_factory=dict)
    """As modules and optimizers have them: what is spread over ranks in one piece."""
    gathered: dict[int, torch.Tensor] = field(default_factory=dict)
    """Storages into which parameters are gathered from all ranks for a while."""
    bucket_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        for part in dense_parts(tensor):
            address = storage_address(part)
            if not any(address in members for members in self.tensors.values()):
                self.tensors[name][address] = part

    def device(self) -> torch.device:
        """The accelerator in use, or the CPU."""
        for members in self.tensors.values():
            for tensor in members.values():
                if tensor.device.type != "cpu":
                    return tensor.device
        return torch.device("cpu")

    def bytes_by_class(self, device: torch.device) -> dict[str, int]:
        found = {
            name: sum(storage_bytes(tensor, device) for tensor in members.values())
            for name, members in self.tensors.items()
        }
        return {**found, BUCKETS: self.bucket_bytes} if self.bucket_bytes else found

    def total_bytes(self, device: torch.device) -> int:
        return sum(self.bytes_by_class(device).values())


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with storages of their own that a tensor is made of: itself, a sparse one's indices and values, or
    those within a tensor of another kind (sharded, quantized).
    """
    inner = inner_tensors(tensor)
    if inner:
        return tuple(part for member in inner for part in dense_parts(member))
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def reachable_from(step: Any, args: Iterable[Any] = (), kwargs: dict[str, Any] | None = None) -> Reachable:
    """Everything `step` could touch, found without running it; optimizers that hooks on its gradients call, too."""
    found = Reachable()
    modules: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    loose: list[torch.Tensor] = []
    for item in _walk([step, *args, *(kwargs or {}).values()]):
        if isinstance(item, nn.Module):
            modules.append(item)
        elif isinstance(item, torch.optim.Optimizer):
            optimizers.append(item)
        else:
            loose.append(item)
    for module in modules:
        _add_module(found, module)
        if isinstance(module, DistributedDataParallel):
            found.bucket_bytes += bucket_bytes(module)
    hooks = {id(hook): hook for item in found.parameters.values() for hook in gradient_hooks_of(item)}
    for optimizer in (*optimizers, *reachable_optimizers(list(hooks.values()))):
        _add_optimizer(found, optimizer)
    for tensor in loose:
        found.add("inputs", tensor)
    return found


def reachable_modules(step: Any, args: Iterable[Any] = ()) -> list[nn.Module]:
    """Modules that `step` could call."""
    return [item for item in _walk([step, *args]) if isinstance(item, nn.Module)]


def reachable_optimizers(step: Any) -> list[torch.optim.Optimizer]:
    """Optimizers that `step` could call."""
    return [item for item in _walk([step]) if isinstance(item, torch.optim.Optimizer)]


def reachable_scalers(step: Any) -> list[torch.amp.GradScaler]:
    """Gradient scalers that `step` could call."""
    return [item for item in _walk([step], stop_at=(torch.amp.GradScaler,)) if isinstance(item, torch.amp.GradScaler)]


def reachable_leaves(step: Any, args: Iterable[Any] = ()) -> list[torch.Tensor]:
    """Tensors in no module or optimizer that `step` could compute gradients of."""
    found = (item for item in _walk([step, *args]) if isinstance(item, torch.Tensor))
    return [tensor for tensor in found if tensor.is_leaf and tensor.requires_grad]


def is_used_up(item: Any) -> bool:
    """Whether an optimizer is called from a hook as soon as the gradient of a parameter is there."""
    if not isinstance(item, nn.Parameter) or changes_gradients(item) or _is_distributed():
        return False
    hooks = gradient_hooks_of(item)
    return bool(hooks) and all(map(reachable_optimizers, hooks))


def _is_distributed() -> bool:
    """Whether others wait for gradients, too."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value that is one, or a list, tuple or dict of such values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for member in value:
            yield from tensors_within(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from tensors_within(member)


def _add_module(found: Reachable, module: nn.Module) -> None:
    for whole in gathered_from(module):
        found.gathered.update((storage_address(part), part) for part in dense_parts(whole))
    for parameter in (*shards_of(module), *module.parameters()):
        _add_parameter(found, parameter)
    for buffer in module.buffers():
        found.add("buffers", buffer)


def _add_parameter(found: Reachable, parameter: torch.Tensor) -> None:
    if any(storage_address(part) in found.gathered for part in dense_parts(parameter)):
        return
    found.parameters[id(parameter)] = parameter
    found.add("parameters", parameter)
    if parameter.grad is not None:
        found.add("gradients", parameter.grad)


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one that holds the state: Accelerate and Lightning wrap optimizers in optimizers, and ZeRO-1 one that has
    this rank's part of the parameters.
    """
    inner, names = optimizer, ("optimizer", "optim")
    while within := [item for name in names if isinstance(item := getattr(inner, name, None), torch.optim.Optimizer)]:
        inner = within[0]
    return inner


def _add_optimizer(found: Reachable, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _add_parameter(found, parameter)
    for state in innermost(optimizer).state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                found.add("optimizer state", tensor)


def _walk(roots: list[Any], stop_at: tuple[type, ...] = ()) -> Iterator[Any]:
    """Modules, optimizers, tensors and `stop_at` behind `roots`; what they hold themselves is not walked into."""
    pending, seen = list(roots), set[int]()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (nn.Module, torch.optim.Optimizer, torch.Tensor, *stop_at)):
            yield item
        else:
            pending.extend(_members(item))


def _members(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (tuple, list, set)):
        return item
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if not _is_user_object(item):
        return ()
    if isinstance(item, types.FunctionType):
        return _function_members(item)
    slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


def _function_members(function: types.FunctionType) -> list[Any]:
    found: list[Any] = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    found.extend(function.__defaults__ or ())
    found.extend(function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__)
    wrapped = getattr(function, "__wrapped__", None)
    return [*found, *([wrapped] if wrapped is not None else [])]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_library(module_name: str) -> bool:
    """Whether code of that name holds nothing of a user's step; see `_LIBRARIES`."""
    return module_name != "__main__" and module_name.split(".")[0] in _LIBRARIES


def _is_user_object(item: Any) -> bool:
    """Plain instances and functions of a user's own code (trainers, states), not modules, classes or libraries."""
    owner = item if isinstance(item, types.FunctionType) else type(item)
    name = getattr(owner, "__module__", None) or ""
    return not isinstance(item, (types.ModuleType, type)) and not is_library(name)
