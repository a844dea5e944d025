"""Out of memory at chosen ops, or beyond a number of bytes, and what a step has in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.living_storages import LivingStorages
from remat.pytorch.reach import tensors_within

ROOT_GRADIENT = torch.ops.aten.ones_like.default
"""What backward begins with, which is the caller's where a module alone is guarded."""


class _Following(TorchDispatchMode):
    """Knows the bytes of what ops made and what still lives."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = 0
        self._living: LivingStorages[int] = LivingStorages()

    def live_bytes(self) -> int:
        return sum(size for _, size in self._living.items())

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = {storage_address(item) for item in tensors_within((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for item in tensors_within(result):
            if storage_address(item) not in given:
                self._living.add(item, item.untyped_storage().nbytes())
        return result


class OutOfMemoryAt(_Following):
    """Raises at the ops whose numbers are given, counted through all runs; views and a loss's own gradient do not
    count."""

    def __init__(self, *places: int, message: str = "") -> None:
        super().__init__()
        self.places, self.message, self.seen = set(places), message, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts = not func.is_view and func is not ROOT_GRADIENT
        self.seen += counts
        if counts and self.seen in self.places:
            self.places.discard(self.seen)
            self.raised += 1
            raise RuntimeError(self.message) if self.message else torch.OutOfMemoryError("injected")
        return self.follow(func, args, kwargs)


class OutOfMemoryAbove(_Following):
    """A device of `limit` bytes for what the ops of a step make."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.peak = limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.follow(func, args, kwargs)
        live = self.live_bytes()
        if live > self.limit:
            self.raised += 1
            raise torch.OutOfMemoryError(f"{live} of {self.limit} bytes")
        self.peak = max(self.peak, live)
        return result
