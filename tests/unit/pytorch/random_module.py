"""Modules made of a random chain of layers that look different to a scheduler: views, in-place ops, branches, noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class RandomModule(nn.Module):
    def __init__(self, seed: int, depth: int = 6) -> None:
        super().__init__()
        choice = random.Random(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
            self.norms = nn.ModuleList(choice.choice((nn.LayerNorm, nn.BatchNorm1d))(WIDTH) for _ in range(depth))
        self.kinds = [choice.choice(sorted(LAYERS)) for _ in range(depth)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, linear, norm in zip(self.kinds, self.linears, self.norms, strict=True):
            x = LAYERS[kind](x, linear, norm)
        return x.square().mean()


Layer = Callable[[torch.Tensor, nn.Module, nn.Module], torch.Tensor]


def _branches(x: torch.Tensor, linear: nn.Module, norm: nn.Module) -> torch.Tensor:
    left, right = linear(x).chunk(2, -1)
    return torch.cat([left.sigmoid() * right, x[:, : WIDTH // 2]], -1)


def _attention(x: torch.Tensor, linear: nn.Module, norm: nn.Module) -> torch.Tensor:
    heads = linear(x).view(-1, 16, 2, WIDTH // 2).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
    return mixed.transpose(1, 2).reshape(x.shape)


def _views(x: torch.Tensor, linear: nn.Module, norm: nn.Module) -> torch.Tensor:
    flipped = x.t().contiguous().view(2, -1)
    return linear(flipped.reshape(WIDTH, -1).t()) + x


def _in_place(x: torch.Tensor, linear: nn.Module, norm: nn.Module) -> torch.Tensor:
    return linear(x).add_(1.0).mul_(x.detach()).clamp(-3, 3)


LAYERS: dict[str, Layer] = {
    "gelu": lambda x, linear, norm: F.gelu(linear(x)),
    "dropout": lambda x, linear, norm: F.dropout(linear(x), 0.3) + x,
    "norm": lambda x, linear, norm: norm(linear(x)) + x,
    "softmax": lambda x, linear, norm: linear(x).softmax(-1) * x,
    "branches": _branches,
    "attention": _attention,
    "views": _views,
    "in place": _in_place,
    "twice": lambda x, linear, norm: F.silu(linear(F.silu(linear(x)))),
}
