"""A BERT-style encoder: tokens of shape (batch, length) in, masked-language-model loss or logits out.

`attend` is True where a token may be looked at; padding is False. Targets are -100 where no token was masked.
"""

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
_IGNORED = -100
_MASK_TOKEN = 0
_MASKED_SHARE = 0.15


class BERT(nn.Module):
    def __init__(self, *, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width, dropout)
        self.layers = nn.ModuleList(Block(width, heads, dropout, causal=False) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens: Tensor, attend: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        mask = attend[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        logits = self.head(hidden)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


def example(*, batch: int, length: int, vocabulary: int, width: int, depth: int, heads: int, dropout: float) -> Example:
    model = BERT(vocabulary=vocabulary, length=length, width=width, depth=depth, heads=heads, dropout=dropout)
    text = torch.randint(1, vocabulary, (batch, length))
    lengths = torch.randint(length // 2, length + 1, (batch, 1))
    attend = torch.arange(length) < lengths
    masked = (torch.rand(batch, length) < _MASKED_SHARE) & attend
    # At least one masked token in each row keeps the mean of the loss defined.
    masked[:, 0] = True
    tokens = torch.where(masked, _MASK_TOKEN, text)
    targets = torch.where(masked, text, _IGNORED)
    return Example(model, (tokens, attend), {"targets": targets})
