"""The same model on a larger or smaller batch, made from the batch at hand.

In: an `Example`, an axis and a size. Out: the example with its tensors repeated or cut along dimension 0 (batch) or 1
(length). The first tensor that has the dimension says what the size is; tensors of another size there, such as masks
and tables, are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from remat.core.results.max_batch import AXES
from remat.errors import RematError
from remat.zoo.example import Example


def size_along(example: Example, axis: str) -> int:
    """The batch size or sequence length of the example."""
    dimension = AXES[axis]
    for tensor in _tensors((example.args, example.kwargs)):
        if tensor.dim() > dimension:
            return int(tensor.shape[dimension])
    raise RematError(
        f"No tensor among the step's arguments has a dimension {dimension}, so there is no {axis} to change."
    )


def resized(example: Example, axis: str, size: int) -> Example:
    """The same model with arguments of `size` along `axis`."""
    dimension, before = AXES[axis], size_along(example, axis)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() <= dimension or tensor.shape[dimension] != before:
            return tensor
        places = torch.arange(size, device=tensor.device) % before
        return tensor.detach().index_select(dimension, places).requires_grad_(tensor.requires_grad)

    return Example(example.model, _mapped(example.args, change), _mapped(dict(example.kwargs), change))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to every tensor in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
