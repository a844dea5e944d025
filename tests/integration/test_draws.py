"""Random numbers that decide nothing are drawn as in eager, also where nobody reads them, and break no graph."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
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


class MaskingByNumpy(nn.Module):
    """Masks that NumPy draws, as those of speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        chosen = np.random.choice(np.arange(len(x)), 4, replace=False)
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[torch.from_numpy(chosen)] = True
        return F.dropout(self.after(x.masked_fill(mask[:, None], 0.5)), 0.3).pow(2).mean()


@pytest.mark.filterwarnings("ignore:Not planned, runs as before")
def test_numbers_of_numpy_come_from_its_own_generator() -> None:
    plain = MaskingByNumpy()
    model = copy.deepcopy(plain)
    optimized = remat.optimize(model, "64MiB", progress=False)
    for number in range(4):
        found = []
        for item, call in ((plain, plain), (model, optimized)):
            item.zero_grad()
            torch.manual_seed(number)
            np.random.seed(number)
            loss = call(X)
            loss.backward()
            found.append((loss.detach(), [one.grad for one in item.parameters()], torch.rand(1), np.random.rand()))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][2], found[1][2])
        assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))
        assert found[0][3] == found[1][3]
