"""What is compared: a module that returns its loss, with one batch.

Every module is in training mode, with parameters in fp32, and everything is drawn from one seed, so that all
configurations train the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


# No slots: what a step can reach is found through the attributes of the object.
@dataclass(frozen=True)
class Workload:
    model: nn.Module
    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class Model:
    build: Callable[[int], Workload]
    """Takes the batch size, builds on torch's default device."""
    batch: int
    parked: int = 32
    """How many processes that hold its parameters may wait beside one that trains."""


class LossInside(nn.Module):
    """A model that returns its own loss, seen as one that returns only the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.model(inputs, labels=labels).loss
