"""Random numbers that decide nothing are drawn as in eager, also where nobody reads them, and break no graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.pytorch.run.optimize import session_of

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))


class LeavingOut(nn.Module):
    """Layers that can be left out at random, as those of Whisper, BART and OPT."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.rate:
                    continue
            x = F.dropout(torch.tanh(layer(x)), 0.3) + x
        return x.pow(2).mean()


class DrawingForNobody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.randn_like(x)
        return F.dropout(self.layer(x), 0.3).pow(2).mean()


def trained_alike(plain: nn.Module) -> Any:
    model = copy.deepcopy(plain)
    optimized = remat.optimize(model, "64MiB", progress=False)
    states = []
    for number in range(3):
        for item, call in ((plain, plain), (model, optimized)):
            item.zero_grad()
            torch.manual_seed(number)
            call(X).backward()
            states.append(torch.get_rng_state())
        pairs = zip(plain.parameters(), model.parameters(), strict=True)
        assert all(one.grad is other.grad is None or torch.equal(one.grad, other.grad) for one, other in pairs)
        assert torch.equal(*states[-2:])
    return optimized


@pytest.mark.parametrize("rate", [0.0, 0, -1.0])
def test_layers_that_are_never_left_out_are_one_graph(rate: float) -> None:
    torch.manual_seed(0)
    session = session_of(trained_alike(LeavingOut(rate)))
    assert len(session.graphs) == 1 and session.left_out == 0


@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
def test_layers_that_are_left_out_at_random_are_left_out_as_in_eager() -> None:
    torch.manual_seed(0)
    trained_alike(LeavingOut(0.4))


def test_random_numbers_that_nobody_reads_are_drawn() -> None:
    torch.manual_seed(0)
    trained_alike(DrawingForNobody())
