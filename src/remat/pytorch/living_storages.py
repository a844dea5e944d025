"""Storages followed from first sight to death by weak references: looking does not keep them alive.

In: tensors, and what is to be remembered of their storages. Out: what was remembered of any that still lives; whoever
wants to know is told when one dies. Views share their storage, so they are one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from remat.pytorch._compat.tensors import storage_address

Known = TypeVar("Known")


class LivingStorages(Generic[Known]):
    def __init__(self, on_death: Callable[[Known], None] | None = None) -> None:
        self._on_death = on_death
        self._living: dict[int, tuple[Known, weakref.ref[Any]]] = {}
        """By address, with the reference that tells of the death."""

    def __contains__(self, tensor: Any) -> bool:
        """Whether the storage, or that of a tensor, is known."""
        return storage_address(tensor) in self._living

    def get(self, tensor: Any) -> Known | None:
        return self._living.get(storage_address(tensor), (None,))[0]

    def add(self, tensor: Any, known: Known) -> None:
        """From now on, for a tensor or a storage; what was known of it is forgotten."""
        address = storage_address(tensor)
        storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor
        self._living[address] = known, weakref.ref(storage, lambda gone: self._forget(address, gone))

    def items(self) -> Iterator[tuple[int, Known]]:
        """With the addresses of their storages."""
        return ((address, known) for address, (known, _) in self._living.items())

    def _forget(self, address: int, gone: weakref.ref[Any]) -> None:
        known, reference = self._living.get(address, (None, None))
        if reference is not gone:
            # Another storage is remembered for this address by now.
            return
        del self._living[address]
        if self._on_death is not None:
            self._on_death(known)  # type: ignore[arg-type]
