"""Steps that cannot be captured as one graph: each decides in Python what it computes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.bench_online import Experts
from torch import nn

Step = Callable[[], torch.Tensor]


class LengthLstm(nn.Module):
    """Reads until a gate says stop."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.cell, self.stop, self.dropout = nn.LSTMCell(width, width), nn.Linear(width, 1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = memory = torch.zeros_like(x[0])
        total = hidden.new_zeros(())
        for number in range(len(x)):
            hidden, memory = self.cell(self.dropout(x[number]), (hidden, memory))
            total = total + hidden.square().mean()
            if number > 12 and float(self.stop(hidden.detach()).mean().detach()) > 10:
                break
        return total


class TreeLstm(nn.Module):
    """Child-sum over trees that are nested tuples."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gates, self.forget, self.width = nn.Linear(2 * width, 3 * width), nn.Linear(2 * width, width), width

    def forward(self, tree: Any, words: torch.Tensor) -> torch.Tensor:
        return self.node(tree, words)[0].square().mean()

    def node(self, tree: Any, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        word, *children = tree
        found = [self.node(child, words) for child in children]
        zero = words.new_zeros(words.shape[1], self.width)
        below = sum((hidden for hidden, _ in found), zero)
        gate, out, new = self.gates(torch.cat([words[word], below], 1)).chunk(3, 1)
        memory = gate.sigmoid() * new.tanh()
        for hidden, cell in found:
            memory = memory + self.forget(torch.cat([words[word], hidden], 1)).sigmoid() * cell
        return out.sigmoid() * memory.tanh(), memory


def tree(depth: int, place: int = 1) -> Any:
    return (place % 7, *(tree(depth - 1, 2 * place + child) for child in range(2))) if depth else (place % 7,)


class ScaledTanh(torch.autograd.Function):
    """Saves a result of its own, and one tensor as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        wide = x * scale
        bent = wide.tanh()
        ctx.save_for_backward(bent, x)
        ctx.scale = scale
        return bent * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        bent, x = ctx.saved_tensors
        return grad * (bent + x * (1 - bent.square()) * ctx.scale), None


class CustomFunctions(nn.Module):
    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = ScaledTanh.apply(layer(x), 0.5 + number)
            if float(x.detach().abs().max()) > 1e6:
                break
        return x.square().mean()


def length_lstm() -> tuple[nn.Module, tuple[Any, ...]]:
    return LengthLstm(), (torch.randn(24, 64, 32),)


def tree_lstm() -> tuple[nn.Module, tuple[Any, ...]]:
    return TreeLstm(), (tree(4), torch.randn(7, 64, 32))


def python_experts() -> tuple[nn.Module, tuple[Any, ...]]:
    return Experts(32, depth=4), (torch.randn(1024, 32),)


def custom_functions() -> tuple[nn.Module, tuple[Any, ...]]:
    return CustomFunctions(), (torch.randn(512, 32),)


MODELS = (length_lstm, tree_lstm, python_experts, custom_functions)
