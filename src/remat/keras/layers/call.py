"""What is known of one call of a layer: the type that facts, times and problems share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CallFacts:
    name: str
    makes: tuple[int, ...]
    """Keys of its outputs."""
    reads: tuple[int, ...]
    """Keys of its inputs."""
    sizes: tuple[int, ...]
    """Of its outputs, in bytes."""
    kept_bytes: int
    """What its backward reads of what is neither an input nor an output of a call."""
    kept_keys: frozenset[int]
    """What its backward reads of inputs and outputs of calls."""
    weight_bytes: int
    """Of the gradients of its weights."""
    forward_workspace: int
    backward_workspace: int
    has_state: bool
    """Whether a second run would change something a second time."""
    has_gradient: bool
    specs: tuple[Any, ...] = ()
    """Shapes and types of its outputs."""
    signature: tuple[Any, ...] = ()
    """Equal for calls that do the same on the same shapes."""

    @property
    def made_bytes(self) -> int:
        return sum(self.sizes)
