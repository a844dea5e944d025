"""Eager steps whose values spend a while in host memory or on disk: same bits, and the peak that was predicted."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import zoo
from remat.core.copies import Link, copies_of
from remat.core.problem import LARGEST_BYTES
from remat.errors import BudgetError
from remat.pytorch.host import shared
from remat.pytorch.run import planning

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link on which copying is worth more than computing again, whatever this machine does."""
    monkeypatch.setattr(shared, "link_to", lambda where, device: Link(8.0, 8.0, 1000.0))
    monkeypatch.setattr(shared, "shared_store", shared.functools.cache(shared.LenientStore))


def trained(model: nn.Module, example: zoo.Example) -> list[torch.Tensor]:
    torch.manual_seed(0)
    example.model.zero_grad()
    loss = model(*example.args, **example.kwargs)
    loss.backward()
    return [loss.detach(), *(item.grad.clone() for item in example.model.parameters() if item.grad is not None)]


def test_bits_are_the_same_and_the_peak_is_the_one_predicted() -> None:
    example = zoo.build("gpt")
    expected = trained(example.model, example)
    model = remat.optimize(example.model, "0.35x", offload="cpu", time_limit=2)
    assert all(map(torch.equal, expected, trained(model, example)))
    plan = remat.plan_of(model)
    assert plan.offload == "cpu" and copies_of(plan.problem.graph)
    assert plan.predicted_peak <= plan.budget_bytes
    example.model.zero_grad()
    assert remat.measure(model, *example.args, **example.kwargs).peak_bytes == plan.predicted_peak
    assert shared.shared_store("cpu", CPU).used_bytes == 0, "what came back is released"


def test_disk_alone_trains_with_the_same_bits_and_leaves_nothing(tmp_path: Path) -> None:
    example = zoo.build("gpt")
    expected = trained(example.model, example)
    model = remat.optimize(example.model, "0.3x", offload=f"disk:{tmp_path}", time_limit=2)
    for _ in range(2):
        assert all(map(torch.equal, expected, trained(model, example)))
    assert copies_of(remat.plan_of(model).problem.graph)
    assert not list(tmp_path.iterdir())


def test_saved_plan_offloads_again(tmp_path: Path) -> None:
    example = zoo.build("mlp")
    expected = trained(example.model, example)
    plan = remat.plan(example.model, *example.args, budget="0.4x", offload="cpu", time_limit=1)
    plan.save(tmp_path / "plan.json")
    again = remat.Plan.load(tmp_path / "plan.json")
    assert again == plan and copies_of(again.problem.graph)
    model = remat.apply(example.model, again)
    assert all(map(torch.equal, expected, trained(model, example)))


def test_kept_graph_finds_what_is_on_the_host_twice() -> None:
    example = zoo.build("mlp")
    model = remat.optimize(example.model, "0.4x", offload="cpu", time_limit=1)
    trained(model, example)
    grads = []
    for step in (example.model, model):
        example.model.zero_grad()
        torch.manual_seed(0)
        loss = step(*example.args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward(retain_graph=True)
            loss.backward()
        grads.append([item.grad.clone() for item in example.model.parameters()])
    assert all(map(torch.equal, *grads))


def test_forward_without_backward_gives_the_host_back() -> None:
    example = zoo.build("mlp")
    model = remat.optimize(example.model, "0.4x", offload="cpu", time_limit=1)
    trained(model, example)
    loss = model(*example.args)
    store = shared.shared_store("cpu", CPU)
    assert store.used_bytes > 0
    del loss
    assert store.used_bytes == 0


def test_budget_of_the_host_is_kept() -> None:
    example = zoo.build("mlp")
    plan = remat.plan(example.model, *example.args, budget="0.5x", offload="cpu:4MiB", time_limit=1)
    assert plan.problem.host_budget_bytes == 4 * 2**20
    model = remat.apply(example.model, plan)
    trained(model, example)
    store: Any = shared.shared_store("cpu:4MiB", CPU).inner
    assert 0 < store.total_bytes <= 4 * 2**20


def test_store_that_refuses_is_told_once_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    example = zoo.build("mlp")
    expected = trained(example.model, example)
    known = shared.place_for_plans

    def unlimited(where: str, device: torch.device) -> object:
        place = known(where, device)
        return place and replace(place, budget_bytes=LARGEST_BYTES)

    monkeypatch.setattr(planning, "place_for_plans", unlimited)
    model = remat.optimize(example.model, "0.4x", offload="cpu:1MiB", time_limit=1)
    with pytest.warns(UserWarning, match="Nothing is offloaded from here on") as told:
        for _ in range(3):
            assert all(map(torch.equal, expected, trained(model, example)))
    assert sum("offloaded" in str(item.message) for item in told) == 1
    assert not remat.plan_of(model).offload


def test_folder_that_cannot_be_written_is_told_and_planned_without() -> None:
    example = zoo.build("mlp")
    model = remat.optimize(example.model, "0.6x", offload="disk:/proc/nowhere", time_limit=1)
    with pytest.warns(UserWarning, match="Nothing is offloaded from here on"):
        for _ in range(2):
            trained(model, example)
    assert not remat.plan_of(model).offload


def test_step_of_several_graphs_is_planned_without_and_told() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
            for layer in self.layers[3:]:
                x = torch.tanh(layer(x))
            return x.sum()

    model = remat.optimize(Broken(), "0.9x", offload="cpu", time_limit=1)
    x = torch.randn(256, 64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x).backward()
    assert any("nothing of it is offloaded" in str(item.message) for item in told)
    assert not remat.plan_of(model).offload


@pytest.mark.parametrize("text", ["gpu", "disk", "cpu:half", "cpu:0.5x"])
def test_unknown_place_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(BudgetError) as caught:
        remat.optimize(nn.Linear(2, 2), "1GiB", offload=text)
    assert "\n" not in str(caught.value)
