"""Curves and largest batches of steps whose values may spend a while on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import remat
from remat.core.copies import Link
from remat.core.results.pareto import Pareto
from remat.pytorch.explore.pareto import OFFLOADING
from remat.pytorch.host import shared
from remat.report.tables.chart import chart_text, pareto_chart


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "link_to", lambda where, device: Link(8.0, 8.0, 1000.0))
    monkeypatch.setattr(shared, "shared_store", shared.functools.cache(shared.LenientStore))


class Stack(nn.Module):
    """Wide activations that are cheap to move, none of which is an input of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = torch.tanh(layer(data))
        return data.sum()


def curve() -> Pareto:
    return remat.pareto(
        Stack(), torch.ones(512, 64), budgets=("0.6x",), solvers=(), offload="cpu", verify=True, time_limit=0.3
    )


@pytest.mark.long
def test_a_curve_has_one_more_line_for_copies_and_its_plans_run_as_predicted() -> None:
    found = curve()
    copied = [point for point in found.baselines if point.solver == OFFLOADING]
    assert copied and copied[0].time_ns <= found.points[0].time_ns
    assert all(point.measured_peak_bytes == point.peak_bytes <= point.budget_bytes for point in copied)
    assert min(point.budget_bytes for point in copied) <= found.points[-1].budget_bytes
    assert OFFLOADING in chart_text(pareto_chart(found))
    assert [point.solver for point in found.baselines] == [OFFLOADING] * len(copied)


@pytest.mark.long
def test_a_larger_batch_fits_where_values_may_leave() -> None:
    model, data = Stack(), torch.ones(256, 64)
    alone = remat.max_batch_size(model, data, budget="0.6x", grid=32, time_limit=0.3)
    copied = remat.max_batch_size(model, data, budget="0.6x", grid=32, time_limit=0.3, offload="cpu")
    assert copied.size >= alone.size and alone.offload == ""
    assert copied.measured_peak_bytes is not None and copied.measured_peak_bytes <= copied.budget_bytes
