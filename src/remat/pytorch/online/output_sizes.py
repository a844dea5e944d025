"""How many bytes an op will need, before it runs.

In: an op and its arguments. Out: what the same op took for arguments of the same shapes before, with what its kernel
wanted for itself meanwhile; the first time, what it makes of tensors without data, or where it needs data, as much as
its arguments are. Some matmuls on Arm take their results twice.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.trees import tree_map
from remat.pytorch.device import rules_of
from remat.pytorch.reach import tensors_within

MOST_SEEN = 100_000
"""Shapes that are remembered; a step of ever new lengths would fill the memory with them."""


@dataclass(frozen=True, slots=True)
class Need:
    """Of one call."""

    key: Hashable
    """What to call it by when more is known."""
    made_bytes: int
    taken_bytes: int
    """The most at once while it runs: results, and what the kernel wants for itself."""
    is_watched: bool
    """Whether `taken_bytes` are those of a call like it, and not a guess."""

    @property
    def sure_bytes(self) -> int:
        return self.taken_bytes if self.is_watched else self.made_bytes


class OutputSizes:
    def __init__(self) -> None:
        self._seen: dict[Hashable, Need] = {}

    def guess(self, func: Any, args: Any, kwargs: Any) -> Need:
        key = func, _shape((args, kwargs))
        seen = self._seen.get(key)
        if seen is not None:
            return seen
        foreseen = _foreseen(func, args, kwargs)
        return Need(key, foreseen, 2 * foreseen, is_watched=False)

    def learn(self, need: Need, made_bytes: int, taken_bytes: int | None) -> Need:
        """From what a call really made, and took, where it was watched."""
        if taken_bytes is None and need.is_watched:
            taken_bytes = need.taken_bytes + made_bytes - need.made_bytes
        most = max(made_bytes, taken_bytes or 0)
        found = Need(need.key, made_bytes, most, is_watched=taken_bytes is not None)
        if found != need or not need.is_watched:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self._seen[need.key] = found
        return found


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
