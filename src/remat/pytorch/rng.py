"""Generator states: remembered before a random op that will run again, and replayed when it does.

A state is host data, some 5 kB on CPU and 16 bytes on CUDA; it is not part of the device's budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def get_state(device_type: str) -> torch.Tensor:
    """The default generator's state on the current device of this type."""
    if device_type == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state()


def set_state(device_type: str, state: torch.Tensor) -> None:
    if device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state)


class RngState:
    """One remembered state. Not a tensor to autograd, the tracker or the budget."""

    __slots__ = ("_bytes", "_device_type")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._bytes = get_state(device_type).numpy().tobytes()

    def restore(self) -> None:
        state = torch.frombuffer(bytearray(self._bytes), dtype=torch.uint8)
        set_state(self._device_type, state)

    def replay(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` as it ran when this state was remembered, and leave the generator as found."""
        now = RngState(self._device_type)
        self.restore()
        try:
            return function(*args, **kwargs)
        finally:
            now.restore()


def remember(device_type: str) -> RngState:
    return RngState(device_type)


def replay(state: RngState, op: Any, *args: Any, **kwargs: Any) -> Any:
    return state.replay(op, *args, **kwargs)
