"""An LSTM language model: tokens of shape (batch, length) in, next-token loss or logits out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.zoo.example import Example

SIZES: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=32, length=32, vocabulary=64, width=64, depth=6, dropout=0.2),
    "demo": dict(batch=64, length=64, vocabulary=256, width=192, depth=6, dropout=0.2),
}


class LSTM(nn.Module):
    def __init__(self, *, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, num_layers=depth, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden, _ = self.recurrent(self.dropout(self.embedding(tokens)))
        logits = self.head(self.dropout(hidden))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def example(*, batch: int, length: int, vocabulary: int, width: int, depth: int, dropout: float) -> Example:
    model = LSTM(vocabulary=vocabulary, width=width, depth=depth, dropout=dropout)
    text = torch.randint(vocabulary, (batch, length + 1))
    return Example(model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()))
