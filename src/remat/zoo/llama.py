"""A Llama-shaped causal language model: tokens of shape (batch, length) in, next-token loss or logits out.

Touvron et al., "LLaMA", with grouped-query attention: RMSNorm before each branch, rotary positions, SwiGLU, no biases.
The sizes "1b", "8b" and "70b" are those of published models, meant for fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.zoo.example import Example

SIZES: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=16, length=64, vocabulary=64, width=64, depth=4, heads=4, key_heads=2, hidden=160),
    "demo": dict(batch=16, length=128, vocabulary=2048, width=192, depth=6, heads=6, key_heads=2, hidden=512),
    "1b": dict(batch=1, length=2048, vocabulary=128256, width=2048, depth=16, heads=32, key_heads=8, hidden=8192),
    "8b": dict(batch=1, length=2048, vocabulary=128256, width=4096, depth=32, heads=32, key_heads=8, hidden=14336),
    "70b": dict(batch=1, length=2048, vocabulary=128256, width=8192, depth=80, heads=64, key_heads=8, hidden=28672),
}
_ROTARY_BASE = 500_000.0


class LlamaAttention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query = nn.Linear(width, heads * self.size, bias=False)
        self.key = nn.Linear(width, key_heads * self.size, bias=False)
        self.value = nn.Linear(width, key_heads * self.size, bias=False)
        self.out = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query = _rotate(self._split(self.query(hidden)), cosine, sine)
        key = _rotate(self._split(self.key(hidden)), cosine, sine)
        value = self._split(self.value(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.size)).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = LlamaAttention(width, heads, key_heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cosine, sine)
        return hidden + self.mlp(self.mlp_norm(hidden))


class Llama(nn.Module):
    cosine: Tensor
    sine: Tensor

    def __init__(
        self, *, vocabulary: int, length: int, width: int, depth: int, heads: int, key_heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, key_heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        frequencies = _ROTARY_BASE ** (-torch.arange(0, size, 2) / size)
        angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        cosine, sine = (table[: tokens.shape[1]].to(hidden.dtype) for table in (self.cosine, self.sine))
        for layer in self.layers:
            hidden = layer(hidden, cosine, sine)
        logits = self.head(self.norm(hidden))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair of features by an angle that grows with the position."""
    left, right = heads.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (heads * cosine + turned * sine).to(heads.dtype)


def example(*, batch: int, length: int, **sizes: int) -> Example:
    model = Llama(length=length, **sizes)
    text = torch.randint(sizes["vocabulary"], (batch, length + 1))
    return Example(model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()))
