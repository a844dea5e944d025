"""A GPT-style causal language model: tokens of shape (batch, length) in, next-token loss or logits out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.zoo.example import Example
from remat.zoo.transformer import Block, Embedding

SIZES: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=16, length=64, vocabulary=64, width=64, depth=6, heads=4, dropout=0.1),
    "demo": dict(batch=16, length=128, vocabulary=512, width=192, depth=8, heads=6, dropout=0.1),
}


class GPT(nn.Module):
    def __init__(self, *, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width, dropout)
        self.layers = nn.ModuleList(Block(width, heads, dropout, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def example(*, batch: int, length: int, vocabulary: int, width: int, depth: int, heads: int, dropout: float) -> Example:
    model = GPT(vocabulary=vocabulary, length=length, width=width, depth=depth, heads=heads, dropout=dropout)
    text = torch.randint(vocabulary, (batch, length + 1))
    return Example(model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()))
