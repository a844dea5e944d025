"""The storages a followed step has met, each followed by a weak reference from first sight to death.

Views share their storage, so they are one. A storage whose memory was replaced (`resize_`) counts as a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from remat.core.results.profile import BEFORE, MemoryClass
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.measure.ledger import Ledger, SeenStorage


@dataclass(slots=True)
class Followed:
    """A storage, what is known of its life, and what it turns out to be."""

    seen: SeenStorage
    ref: Callable[[], Any]
    """The storage, or None once it is gone."""
    kind: MemoryClass
    name: str
    module: str
    last_forward_use: int = BEFORE
    first_backward_use: int = BEFORE
    writers: list[int] = field(default_factory=list)
    """The op that made it, and those that changed it in forward."""


class FollowedStorages:
    """In the order in which they were met."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._all: list[Followed] = []
        self._living: dict[int, Followed] = {}
        self.op = BEFORE
        """The op that began last."""
        self.inside_op = False

    def __iter__(self) -> Iterator[Followed]:
        return iter(self._all)

    def known(self, tensor: torch.Tensor) -> Followed | None:
        storage = tensor.untyped_storage()
        item = self._living.get(storage_address(storage))
        return item if item is not None and item.seen.address == self._ledger.address_of(storage) else None

    def meet(
        self, tensor: torch.Tensor, kind: MemoryClass, *, name: str = "", module: str = "", is_result: bool = False
    ) -> Followed | None:
        """Follow the storage of `tensor` from now on; None where it takes no memory of the device."""
        size = self._ledger.size_of(tensor)
        return self._add(tensor.untyped_storage(), size, kind, name, module, is_result) if size else None

    def adopt(self, other: Followed) -> None:
        """Follow on, as having been there before, a storage that another step left behind."""
        storage = other.ref()
        if storage is not None and storage_address(storage) not in self._living:
            self._add(storage, other.seen.size_bytes, other.kind, other.name, other.module, is_result=False)

    def close(self) -> None:
        """The step is over: deaths count no more, and nobody is called when a storage dies."""
        self._living.clear()
        for item in self._all:
            storage = item.ref()
            item.ref = weakref.ref(storage) if storage is not None else _gone

    def _add(self, storage: Any, size: int, kind: MemoryClass, name: str, module: str, is_result: bool) -> Followed:
        key = storage_address(storage)
        seen = SeenStorage(size, self._ledger.address_of(storage), self.op, is_result)
        item = Followed(seen, weakref.ref(storage, lambda _: self._forget(key, seen)), kind, name, module)
        self._all.append(item)
        self._living[key] = item
        return item

    def _forget(self, key: int, seen: SeenStorage) -> None:
        seen.last_op, seen.died_inside = self.op, self.inside_op
        if key in self._living and self._living[key].seen is seen:
            del self._living[key]


def _gone() -> None:
    return None
