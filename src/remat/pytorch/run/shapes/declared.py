"""Sizes that a user declares to change: `remat.optimize(..., dynamic={"length": (1, 4096)})`.

In: what was declared, and the arguments of each call. Out: bounds with the sizes of the call, whose tensors are marked
for tracing. A first call outside of them is refused; once training has begun, it goes on and is told of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.core.results.max_batch import AXES
from remat.errors import RematError
from remat.pytorch._compat.symbols import leave_open
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.run.shapes.buckets import SMALLEST, Bound


def parse_bounds(dynamic: Any) -> tuple[Bound, ...]:
    """From what `dynamic=` was given."""
    if isinstance(dynamic, bool):
        return ()
    if not isinstance(dynamic, Mapping):
        raise RematError(f'dynamic={dynamic!r} is none of True, False and bounds such as {{"length": (1, 4096)}}.')
    return tuple(_bound(axis, given) for axis, given in dynamic.items())


def _bound(axis: Any, given: Any) -> Bound:
    if axis not in AXES:
        raise RematError(f"There is no axis {axis!r} to declare; it is one of {', '.join(AXES)}.")
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2 and all(type(item) is int for item in given)
    if not is_pair or not 1 <= given[0] <= given[1]:
        raise RematError(f"The bounds of {axis!r} are {given!r}; give its smallest and largest size, as (1, 4096).")
    return Bound(axis, given[0], given[1])


def declare(
    bounds: Sequence[Bound], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_marked: bool
) -> tuple[Bound, ...]:
    """The bounds with the sizes of a call; `is_marked` has tracing leave them open."""
    tensors = [item for item in tree_leaves((list(args), dict(kwargs))) if isinstance(item, torch.Tensor)]
    found = []
    for bound in bounds:
        dim = AXES[bound.axis]
        size = next((int(item.shape[dim]) for item in tensors if item.dim() > dim), None)
        if size is None:
            raise RematError(f"No tensor among the arguments has a dimension {dim}, so there is no {bound.axis}.")
        if is_marked and size >= SMALLEST:
            for item in tensors:
                if item.dim() > dim and item.shape[dim] == size:
                    leave_open(item, dim)
        found.append(replace(bound, size=size))
    return tuple(found)


def outside_bounds(bounds: Sequence[Bound]) -> Bound | None:
    """The first whose size in this call is not as declared."""
    return next((bound for bound in bounds if not bound.least <= bound.size <= bound.most), None)
