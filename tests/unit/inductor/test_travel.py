"""Saved tensors of compiled halves that travel to the host and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat.core.copies import Link, OffloadPlace
from remat.inductor import graph
from remat.inductor.model.predict import Moment, Prediction
from remat.inductor.offload import most_away
from remat.inductor.travel import NodeTimes, Travel
from remat.pytorch.host import shared


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "link_to", lambda where, device: Link(8.0, 8.0, 1000.0))


def stack() -> nn.Module:
    torch.manual_seed(0)
    layers = (part for _ in range(6) for part in (nn.Linear(128, 128), nn.Tanh()))
    return nn.Sequential(*layers)


@pytest.mark.slow
def test_compiled_step_offloads_within_its_budget_and_has_the_same_gradients(
    fast_link: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = stack(), torch.randn(2048, 128)
    compiled: list[bool] = []
    build = graph.build

    def counted(*args: Any) -> Any:
        made = build(*args)
        compiled.extend([bool(made.away_bytes)] if made is not None else [])
        return made

    monkeypatch.setattr(graph, "build", counted)

    def step(module: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        module(x).square().mean().backward()
        return [item.grad.clone() for item in model.parameters() if item.grad is not None]

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    expected = step(model)
    optimized = remat.optimize(WithLoss(), "0.45x", compiler="inductor", offload="cpu", time_limit=1)
    for _ in range(2):
        model.zero_grad()
        optimized(x).backward()
        found = [item.grad.clone() for item in model.parameters() if item.grad is not None]
        assert all(torch.allclose(mine, other, atol=1e-5) for mine, other in zip(found, expected, strict=True))
    plan = remat.plan_of(optimized)
    assert plan.offload == "cpu" and plan.predicted_peak <= plan.budget_bytes
    assert compiled and all(compiled), "code without copies is not compiled first"
    model.zero_grad()
    assert remat.measure(optimized, x).peak_bytes <= plan.budget_bytes
    assert shared.shared_store("cpu", torch.device("cpu")).used_bytes == 0
    plan.save(tmp_path / "plan.json")
    applied = remat.apply(WithLoss(), remat.Plan.load(tmp_path / "plan.json"))
    model.zero_grad()
    applied(x).backward()
    found = [item.grad.clone() for item in model.parameters() if item.grad is not None]
    assert all(torch.allclose(mine, other, atol=1e-5) for mine, other in zip(found, expected, strict=True))
    assert remat.plan_of(applied).offload == "cpu"
    model.zero_grad()
    assert remat.measure(applied, x).peak_bytes <= plan.budget_bytes


def test_no_more_is_away_than_can_leave_and_come_back() -> None:
    def prediction(forward_ns: float, backward_ns: float) -> Prediction:
        moments = Moment(0, False, 0, 8, forward_ns), Moment(1, True, 1, 8, backward_ns)
        return Prediction(moments, forward_ns + backward_ns, 0.0, 8, frozenset())

    place = OffloadPlace("cpu", Link(2.0, 1.0))
    assert most_away(prediction(110.0, 330.0), place) == pytest.approx(200, abs=1)
    assert most_away(prediction(110.0, 55.0), place) == pytest.approx(50, abs=1)
    assert most_away(prediction(110.0, 55.0), OffloadPlace("cpu:10", Link(2.0, 1.0), 10)) == 10


def test_what_stays_because_the_store_refuses_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.inductor.away_ops import fetch, fetched, send, sent

    store = shared.LenientStore("cpu", torch.device("cpu"))
    store.has_failed = True
    monkeypatch.setattr("remat.inductor.away_ops.shared_store", lambda where, device: store)
    x = torch.arange(6.0).reshape(2, 3)
    expected = x.clone()
    handle = sent(x, send(x, "cpu"))
    # Compiled code takes the memory of what has left for something else.
    x.zero_()
    for _ in range(2):
        back = fetch(handle, "cpu", [2, 3], [3, 1], torch.float32, x.device)
        fetched(back, handle)
        assert torch.equal(back, expected)
        back.zero_()


def test_copies_back_begin_in_the_order_in_which_they_are_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.sin()
        b = a.cos()
        return b.sum(), a, b

    def backward(a: torch.Tensor, b: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * b.tanh()) * a.exp()

    with FakeTensorMode():
        x, one = torch.empty(2**20), torch.empty(())
        halves = make_fx(forward)(x), make_fx(backward)(x, torch.empty(2**20), one)
    names = [node.name for node in halves[0].graph.output_node().args[0][1:]]
    for node, name in zip(halves[1].graph.nodes, names, strict=False):
        node.name = name
    # So slow that all begin when backward does.
    travel = Travel(OffloadPlace("cpu", Link(0.001, 0.001)), 2**30, NodeTimes({}, {}))
    assert travel.apply(*halves, 1) == 2 * 2**22
    begun = [node.name for node in halves[1].graph.nodes if node.name.endswith("_back")]
    assert begun == [f"{name}_back" for name in reversed(names)]
