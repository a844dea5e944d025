"""A model that returns its loss alone, so that nobody holds its logits.

Models of transformers return logits, hidden states and keys beside the loss, and whoever holds the result holds them
through backward: for a language model that is gigabytes. Here the step ends in the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class LossOnly(nn.Module):
    """`model(*args, **kwargs).loss`; give `labels` as for the model itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(*args, **kwargs).loss
        return loss
