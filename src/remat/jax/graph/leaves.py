"""Arguments as flat leaves: arrays, which move through jax, and the rest, which stays as it is.

In: a call's arguments. Out: `Leaves`, and a key that is equal for calls which one plan serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat.errors import CaptureError
from remat.jax import _compat
from remat.jax.graph import modules


@dataclass(frozen=True, slots=True)
class Leaves:
    arrays: tuple[Any, ...]
    tree: Any
    others: tuple[tuple[int, Any], ...]
    """Leaves that are no arrays, by their place."""

    @staticmethod
    def of(args: Sequence[Any], kwargs: dict[str, Any]) -> Leaves:
        found, tree = jax.tree.flatten(modules.held((tuple(args), kwargs)))
        others = tuple((place, leaf) for place, leaf in enumerate(found) if not is_array(leaf))
        if _compat.manual_mesh() is not None and any(map(_compat.varies, filter(is_array, found))):
            raise CaptureError(
                "Inside shard_map, a function with a backward of its own needs check_vma=False; give shard_map that."
            )
        return Leaves(tuple(leaf for leaf in found if is_array(leaf)), tree, others)

    def call(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        """The function with `arrays` in the place of its own."""
        return self.call_and_look(function, arrays)[0]

    def call_and_look(self, function: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, dict[int, Any]]:
        """The same, and what the call changed of the objects among its arguments."""
        others, given = dict(self.others), iter(arrays)
        count = len(arrays) + len(others)
        whole = jax.tree.unflatten(
            self.tree, [others[place] if place in others else next(given) for place in range(count)]
        )
        (args, kwargs), copies = modules.rebuilt(whole)
        return function(*args, **kwargs), modules.changes(whole, copies)

    @property
    def avals(self) -> tuple[Any, ...]:
        """Shapes and types alone: a plan is made as if all of it were on one device."""
        return tuple(_compat.shape_of(leaf) for leaf in self.arrays)

    @property
    def placed(self) -> tuple[Any, ...]:
        """With the shardings of arrays that lie on several devices."""
        return tuple(map(_compat.placed_aval, self.arrays))

    def share(self, wanted: Sequence[bool]) -> float:
        """What one device has of what is not differentiated: of the batch, and so of what is computed from it."""
        batch = [leaf for leaf, want in zip(self.arrays, wanted, strict=True) if not want]
        whole = sum(_compat.bytes_of(_compat.shape_of(leaf)) for leaf in batch)
        return sum(map(_compat.local_bytes, batch)) / whole if whole else 1.0

    def key(self) -> Any:
        """Equal for calls of the same shapes and the same other arguments."""
        shapes = tuple((aval.shape, str(aval.dtype), bool(aval.weak_type), aval.sharding) for aval in self.avals)
        return self.tree, shapes, tuple((place, _comparable(leaf)) for place, leaf in self.others)

    def shapes(self) -> tuple[str, ...]:
        return tuple(_compat.described(aval) for aval in self.avals)

    def chosen(self, argnums: Sequence[int]) -> tuple[bool, ...]:
        """Of each array, whether it has a derivative and belongs to one of the arguments."""
        args, kwargs = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        if any(not -len(args) <= number < len(args) for number in argnums):
            raise CaptureError(f"argnums is {tuple(argnums)}, and the function was given {len(args)} arguments.")
        inside = {place for number in argnums for place in jax.tree.leaves(modules.parameters(args[number]))}
        others = dict(self.others)
        places = [place for place in range(self.tree.num_leaves) if place not in others]
        return tuple(
            place in inside and _compat.is_differentiable(aval) for place, aval in zip(places, self.avals, strict=True)
        )


def is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _comparable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf
