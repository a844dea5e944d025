"""A model with a batch to train it on: what every zoo model and every command-line target comes down to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from remat.errors import RematError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Example:
    """`model(*args, **kwargs)` returns the scalar loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def as_example(made: object, who: str) -> Example:
    """What a function returned, as an `Example`; `who` it was, as an error names it."""
    if isinstance(made, Example):
        return made
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise RematError(f"{who} returned {type(made).__name__}; return (model, args) or (model, args, kwargs).")
    model, args, *rest = made
    kwargs = rest[0] if rest else {}
    if not isinstance(kwargs, Mapping):
        raise RematError(f"{who} returned {type(kwargs).__name__} as keyword arguments; return a dict.")
    return Example(model, args if isinstance(args, tuple) else (args,), kwargs)
