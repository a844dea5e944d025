"""What a plain step has in memory, followed on fake tensors as if they were real ones.

In: the ops of a step, one after the other, as they are dispatched. Out: what is in memory just after each. Two things
are not as with real tensors, and are put right here. Strides: kernels may lay results out in another way than their
fake versions say, so that a call on tensors with gaps or turned dimensions is tried out once. In-place sums: while a
dispatch mode is active autograd adds gradients up in new memory, and fills gradients of indexed tensors in new memory,
where plain eager writes into what it alone holds.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch

from remat.pytorch._compat.distributed import wrapping_tensors
from remat.pytorch._compat.engine import is_called_by_engine
from remat.pytorch._compat.modes import DispatchMode, HigherOrderOperator
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.costs.calls import Calls, touched_bytes
from remat.pytorch.costs.op_costs import device_key
from remat.pytorch.device import storage_bytes
from remat.pytorch.living_storages import LivingStorages
from remat.pytorch.reach import dense_parts

aten = torch.ops.aten
LARGEST_TRIAL_BYTES = 1 << 30
"""Calls that touch more are not tried for the layout of their results."""

_IN_PLACE = {
    aten.add.Tensor: 2,
    aten.index_put.default: 1,
    aten.scatter.src: 1,
    aten.scatter_add.default: 1,
    aten.index_add.default: 1,
    aten.masked_fill.Scalar: 1,
}
"""What autograd's own code runs in place of one of the first arguments where no mode is active: how many may be it."""

_NO_COMPUTATION = frozenset({"prim", "profiler"})
"""Namespaces of ops that ask or note something; one tells the device of a fake tensor."""

_Layout = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
_layouts: dict[tuple[str, str], _Layout | None] = {}
"""Shapes and strides of what a call really returns, by device and call; None where that cannot be told."""


@dataclass(frozen=True, slots=True)
class PlainOp:
    key: str
    """See `call_key`; empty where it cannot be tried by itself."""
    live_bytes: int
    """In memory just after it ran."""
    touched_bytes: int
    """What it reads and writes."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """The latest op, if eager may have run it in place."""

    level_bytes: int
    """What was in memory before it."""
    targets: tuple[weakref.ref[Any], ...]


class StorageWatch(DispatchMode):
    """Follows storages on one device from birth to death; `current` is in bytes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.current = 0
        self.calls = Calls()
        self._ops: list[PlainOp] = []
        self._live = LivingStorages[int](self._forget)
        self._sum: _Sum | None = None
        self._device_key = device_key(device)

    def see(self, tensor: torch.Tensor) -> None:
        for part in dense_parts(tensor):
            if part not in self._live:
                size = storage_bytes(part, self.device)
                self._live.add(part, size)
                self.current += size

    @property
    def count(self) -> int:
        """How many ops have run."""
        return len(self._ops)

    def finished(self) -> tuple[PlainOp, ...]:
        self._settle_sum()
        return tuple(self._ops)

    def _forget(self, size_bytes: int) -> None:
        self.current -= size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.run_within(func, args, kwargs)
        if any(issubclass(kind, wrapping_tensors()) for kind in types):
            # It asks again for the ops of its parts.
            return NotImplemented
        if func.is_view or func.namespace in _NO_COMPUTATION:
            return func(*args, **kwargs)
        self._settle_sum()
        level = self.current
        result = func(*args, **kwargs)
        key = self.calls.add(func, args, kwargs, result, is_moderate=True)
        touched = touched_bytes((args, kwargs, result))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        self._ops.append(PlainOp(key, self.current, touched))
        if func in _IN_PLACE and not torch.is_grad_enabled() and is_called_by_engine():
            self._sum = _Sum(level, tuple(_exclusive(args[: _IN_PLACE[func]], result)))
        return result

    def _settle_sum(self) -> None:
        """An op ran in place in eager if the engine held its argument alone: then that died with it."""
        if self._sum is not None and any(target() is None for target in self._sum.targets):
            self._ops[-1] = replace(self._ops[-1], live_bytes=self._sum.level_bytes)
        self._sum = None


def _exclusive(arguments: Any, result: Any) -> list[weakref.ref[Any]]:
    """Storages that could have taken `result`."""
    dense = (item for item in arguments if isinstance(item, torch.Tensor) and item.layout is torch.strided)
    found = (item for item in dense if item.dtype is result.dtype)
    return [
        weakref.ref(item.untyped_storage())
        for item in found
        if item.shape == result.shape and item.untyped_storage().nbytes() == _dense_bytes(item) and _is_dense(item)
    ]


def _dense_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no element twice, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
