"""Steps that fail where they are traced run as they are written, if they can."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import remat

FAILS = "fails where it is traced, and not as it is written"


class Masked(nn.Module):
    """Makes something else of a mask where it is traced, in a part that is traced; what reads it is not."""

    def __init__(self, *, counts: bool = False, width: int = 8) -> None:
        super().__init__()
        self.layer, self.norm, self.counts, self.width = nn.Linear(8, 8), nn.BatchNorm1d(8), counts, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x.new_ones(3 if torch.compiler.is_compiling() else self.width)
        if self.counts:
            x = self.norm(x)
        torch._dynamo.graph_break()
        return (torch.dropout(self.layer(x), 0.5, train=True) + mask).square().mean()


def trained(step: Any, x: torch.Tensor, calls: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = []
    for _ in range(calls):
        loss = step(x)
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.filterwarnings("ignore:Not planned")
def test_module_that_fails_only_where_it_is_traced_runs_as_it_is_written() -> None:
    plain, x = Masked(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "10GiB", progress=False)
    with pytest.warns(UserWarning, match=FAILS) as told:
        losses = trained(step, x)
    assert len([item for item in told if FAILS in str(item.message)]) == 1
    assert all(map(torch.equal, losses, trained(plain, x)))
    for parameter, expected in zip(model.layer.parameters(), plain.layer.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


@pytest.mark.filterwarnings("ignore:Not planned")
@pytest.mark.parametrize("model", [Masked(width=3), Masked(counts=True)], ids=["fails in eager", "has changed"])
def test_error_stands_where_eager_fails_too_or_something_was_written_to(model: Masked) -> None:
    step = remat.optimize(model, "10GiB", progress=False)
    with warnings.catch_warnings(record=True) as told, pytest.raises(RuntimeError, match="size of tensor"):
        warnings.simplefilter("always")
        step(torch.randn(4, 8))
    assert not [item for item in told if FAILS in str(item.message)]
