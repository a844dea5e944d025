"""A vision transformer: images of shape (batch, 3, side, side) in, classification loss or logits out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.zoo.example import Example
from remat.zoo.transformer import Block

SIZES: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=16, side=32, patch=4, classes=10, width=64, depth=6, heads=4, dropout=0.1),
    "demo": dict(batch=16, side=60, patch=5, classes=100, width=192, depth=8, heads=6, dropout=0.1),
}


class ViT(nn.Module):
    def __init__(
        self, *, side: int, patch: int, classes: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, heads, dropout, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        hidden = self.dropout(tokens + self.position)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)[:, 0])
        return logits if targets is None else F.cross_entropy(logits, targets)


def example(
    *, batch: int, side: int, patch: int, classes: int, width: int, depth: int, heads: int, dropout: float
) -> Example:
    model = ViT(side=side, patch=patch, classes=classes, width=width, depth=depth, heads=heads, dropout=dropout)
    return Example(model, (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))))
