"""A compiled step that Dynamo captures twice, since its forward writes into what Dynamo looks at."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import remat
from remat.pytorch.run.optimize import session_of

pytestmark = pytest.mark.usefixtures("quick_kernels")


class Deciding(nn.Module):
    """As models of transformers do: what its loss is becomes part of its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())))
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "mean"
        return self.layers(x).square().mean()


def test_what_was_compiled_for_the_first_capture_runs_for_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.inductor import graph

    built = []
    build = graph.build
    monkeypatch.setattr(graph, "build", lambda *args: built.append(args) or build(*args))
    torch.manual_seed(0)
    plain, x = Deciding(), torch.randn(64, 16)
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "0.9x", compiler="inductor", progress=False, time_limit=0.5)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1) for item in (plain, model)]
    for _ in range(3):
        for call, optimizer in zip((plain, step), optimizers, strict=True):
            optimizer.zero_grad()
            call(x).backward()
            optimizer.step()
    first, second = session_of(step).graphs
    assert first.state is second.state
    assert {id(given[0]) for given in built} == {id(first.form.module)}, "nothing was compiled for the second"
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
