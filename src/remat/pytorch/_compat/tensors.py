"""What tensors, ops, modules and autograd's nodes tell only by private names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def storage_address(item: Any) -> int:
    """Which storage a tensor lies on, or which one this is: the same for two as long as both live.

    The address of its C++ object; fake storages have no data whose address could be asked for.
    """
    storage = item.untyped_storage() if isinstance(item, torch.Tensor) else item
    return int(storage._cdata)


def schema_of(op: Any) -> Any:
    """The declaration of an op, None for other functions."""
    return getattr(op, "_schema", None)


def overload_name(op: Any) -> str:
    return str(op._overloadname)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is no tensor that stands for another one or is made of others: its storage is its own."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not torch._is_functional_tensor(tensor)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes it for a view of another tensor."""
    return bool(tensor._is_view())


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What it is a view of; None for no view."""
    base: torch.Tensor | None = tensor._base
    return base


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a COO tensor as they are, coalesced or not; the public names refuse the latter."""
    return tensor._indices(), tensor._values()


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor of a class that wraps others is made of, as a DTensor or a quantized one; nothing for others."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    found = [getattr(tensor, name) for name in names]
    return [item for item in found if isinstance(item, torch.Tensor)]


def with_inner_tensors(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of the same class, made of what `change` returns for each that `tensor` is made of."""
    names, context = tensor.__tensor_flatten__()
    found = {name: getattr(tensor, name) for name in names}
    parts = {name: change(item) if isinstance(item, torch.Tensor) else item for name, item in found.items()}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    return made


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """What runs besides `forward` when the module is called."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
        yield from hooks.values()


def gradient_hooks_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    """What runs when a gradient was accumulated."""
    return tuple((parameter._post_accumulate_grad_hooks or {}).values())


def silence_gradient_hooks(parameter: torch.Tensor) -> Callable[[], None]:
    """Have autograd not call them; gives what puts them back."""
    hooks = parameter._post_accumulate_grad_hooks
    before = dict(hooks)
    hooks.clear()
    return functools.partial(hooks.update, before)


def changes_gradients(parameter: torch.Tensor) -> bool:
    """Whether hooks see gradients before they are accumulated."""
    return bool(parameter._backward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether something runs when gradients pass the module."""
    return bool(module._backward_pre_hooks or module._backward_hooks)


def sequence_number(node: Any) -> int:
    """When autograd's node was made, counted in its thread."""
    return int(node._sequence_nr())


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to, as autograd counts."""
    return int(tensor._version)


def mark_boxed(function: Any) -> None:
    """Tell AOTAutograd that a function takes its arguments in a list and may empty it."""
    function._boxed_call = True


def plain_call(module: nn.Module) -> Any:
    """What calling the module runs: hooks and forward."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Any:
    """What runs in its place, None where nothing does."""
    return module._compiled_call_impl


def with_module(parallel: DistributedDataParallel, module: nn.Module) -> DistributedDataParallel:
    """The same, around another module with the same parameters; copied as usual, it would reduce gradients twice."""
    copied = object.__new__(type(parallel))
    copied.__dict__.update(parallel.__dict__, _modules={**parallel._modules, "module": module})
    return copied


def replace_call(module: nn.Module, function: Any) -> None:
    """Run `function` whenever the module is called, as `Module.compile` does."""
    module._compiled_call_impl = function


def zero_all(tensors: Sequence[torch.Tensor]) -> None:
    """In one call."""
    torch._foreach_zero_(tensors)


def storage_uses(storage: torch.UntypedStorage) -> int:
    """By how many a storage is held, in Python or not; 1 where nothing but this object holds it."""
    return int(torch._C._storage_Use_Count(storage._cdata))
