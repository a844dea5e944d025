"""A multilayer perceptron with dropout: features of shape (batch, width) in, classification loss or logits out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.zoo.example import Example

SIZES: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=2048, width=64, depth=8, classes=10, dropout=0.1),
    "demo": dict(batch=8192, width=256, depth=12, classes=100, dropout=0.1),
}


class MLP(nn.Module):
    def __init__(self, *, width: int, depth: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        logits = self.head(features)
        return logits if targets is None else F.cross_entropy(logits, targets)


def example(*, batch: int, width: int, depth: int, classes: int, dropout: float) -> Example:
    model = MLP(width=width, depth=depth, classes=classes, dropout=dropout)
    return Example(model, (torch.randn(batch, width), torch.randint(classes, (batch,))))
