"""A step of which nothing can be captured keeps to its budget all the same."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import remat
from remat.pytorch.run.optimize import _runner_of


class Tangled(nn.Module):
    """Dynamo is kept out of it, and how deep it goes depends on its data."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(12))

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.mean() > 10:
                break
        return x.square().mean()


@pytest.mark.parametrize("budget", ["0.6x", 900_000])
def test_step_that_cannot_be_captured_runs_online_within_its_budget_with_equal_bits(budget: str | int) -> None:
    torch.manual_seed(0)
    plain = Tangled()
    model = copy.deepcopy(plain)
    x = torch.randn(256, 64)
    step = remat.optimize(model, budget, progress=False, time_limit=0.3)
    plain(x).backward()
    with pytest.warns(UserWarning, match="keeps to the budget as under remat.dtr"):
        step(x).backward()
    contexts = []
    for _ in range(3):
        model.zero_grad()
        loss = step(x)
        contexts.append(_runner_of(step)._uncaptured._open[-1]())
        loss.backward()
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(expected.grad, found.grad)
    assert contexts[-1].recomputations > 0
    assert contexts[-1].peak_bytes <= contexts[-1].budget_bytes


def test_step_without_gradients_is_left_alone() -> None:
    model = Tangled()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    step = remat.optimize(model, "0.5x", progress=False)
    with pytest.warns(UserWarning, match="Nothing of this step could be captured"):
        step(torch.randn(4, 64))
    assert _runner_of(step)._uncaptured is None
