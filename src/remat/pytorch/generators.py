"""All generators that a training step may draw from, as they were: torch's on CPU and devices, Python's and NumPy's.

In: nothing. Out: a `Generators`, which puts them back. Reading them takes microseconds and a few kilobytes of host
memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Generators:
    """The states of all default generators at one moment."""

    __slots__ = ("_cpu", "_cuda", "_numpy", "_python")

    def __init__(self) -> None:
        # As bytes and not as tensors: what follows the step's memory does not see them.
        self._cpu = torch.get_rng_state().numpy().tobytes()
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        states = torch.cuda.get_rng_state_all() if has_cuda else ()
        self._cuda = [state.numpy().tobytes() for state in states]
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        torch.set_rng_state(_as_state(self._cpu))
        if self._cuda:
            torch.cuda.set_rng_state_all([_as_state(state) for state in self._cuda])
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def replay(self, function: Callable[[], Any]) -> Any:
        """Run `function` from this moment's states, and leave the generators as they were found."""
        now = Generators()
        self.restore()
        try:
            return function()
        finally:
            now.restore()


def _as_state(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
