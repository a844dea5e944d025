"""How many bytes an op will make, before it runs.

In: an op and its arguments. Out: what the same op made of arguments of the same shapes before; the first time, what it
makes of tensors without data, or where it needs data, as much as its arguments are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.trees import tree_map
from remat.pytorch.device import rules_of
from remat.pytorch.reach import tensors_within

MOST_SEEN = 100_000
"""Shapes that are remembered; a step of ever new lengths would fill the memory with them."""


class OutputSizes:
    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}

    def guess(self, func: Any, args: Any, kwargs: Any) -> tuple[Hashable, int]:
        """Bytes, and what to call this by when they are known."""
        key = func, _shape((args, kwargs))
        seen = self._seen.get(key)
        return key, seen if seen is not None else _foreseen(func, args, kwargs)

    def learn(self, key: Hashable, made_bytes: int) -> None:
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[key] = made_bytes


def _shape(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    if isinstance(value, dict):
        return tuple((key, _shape(item)) for key, item in value.items())
    return value if isinstance(value, Hashable) else repr(value)


def _foreseen(func: Any, args: Any, kwargs: Any) -> int:
    given = list(tensors_within((args, kwargs)))
    device = next((item.device for item in given), torch.device(kwargs.get("device") or "cpu"))
    rules = rules_of(device)
    try:
        bare = tree_map(_without_data, (args, kwargs))
        if "device" in kwargs:
            bare[1]["device"] = torch.device("meta")
        result = func(*bare[0], **bare[1])
    except Exception:
        # Data decides, or nobody has said what the op makes of none: a guess is all that is asked for.
        return sum(rules.rounded(item.untyped_storage().nbytes()) for item in given)
    inputs = {storage_address(item) for item in tensors_within(bare)}
    made = {storage_address(item): item for item in tensors_within(result)}
    fresh = (item for address, item in made.items() if address not in inputs)
    return sum(rules.rounded(item.untyped_storage().nbytes()) for item in fresh)


def _without_data(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")
