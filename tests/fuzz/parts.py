"""What blocks are made of: a `Part` is a module with a function, and `BLOCKS` knows every kind of block by its name.

A kind is a function from a random choice and sizes to a part. The part maps a tensor to one of the same shape, so that
any chain of parts is a module: `[batch, time, width]` in the layout SEQUENCE, `[batch, width, side, side]` in IMAGE,
where `time` is `side * side`, either of them in ANY.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

import torch
from torch import nn

Run = Callable[[Any, torch.Tensor], torch.Tensor]


class Layout(Enum):
    SEQUENCE = "sequence"
    IMAGE = "image"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large what passes through a module is; `batch` may be 1 or 0, `width` is a multiple of 8."""

    batch: int
    side: int
    width: int

    @property
    def time(self) -> int:
        return self.side * self.side

    def shape(self, layout: Layout) -> tuple[int, ...]:
        if layout is Layout.IMAGE:
            return (self.batch, self.width, self.side, self.side)
        return (self.batch, self.time, self.width)


class Part(nn.Module):
    """Calls `run(part, x)`; members become its parameters, buffers (plain tensors), modules or attributes."""

    def __init__(self, run: Run, **members: Any) -> None:
        super().__init__()
        self.run = run
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


@dataclass(frozen=True, slots=True)
class Block:
    """One kind: how to make it, and the layout it works in."""

    make: Callable[[Random, Sizes], Part]
    layout: Layout
    on_cpu_only: bool = False


BLOCKS: dict[str, Block] = {}


def block(layout: Layout, *, on_cpu_only: bool = False) -> Callable[[Any], Any]:
    """Enter a kind of block under the name of its function, its underscores as spaces."""

    def enter(make: Callable[[Random, Sizes], Part]) -> Callable[[Random, Sizes], Part]:
        BLOCKS[make.__name__.strip("_").replace("_", " ")] = Block(make, layout, on_cpu_only)
        return make

    return enter


def square(sizes: Sizes) -> nn.Linear:
    """A linear layer that keeps the width."""
    return nn.Linear(sizes.width, sizes.width)


def mixing(sizes: Sizes) -> nn.Conv2d:
    """A convolution that keeps the shape."""
    return nn.Conv2d(sizes.width, sizes.width, 3, padding=1)
