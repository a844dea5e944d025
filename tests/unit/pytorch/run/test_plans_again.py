"""Where planning itself fails, the training goes on as it would without a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.steps import same_bits
from torch import nn

import remat
from remat.errors import InvalidSchedule

FAILS = "could not be planned .*: nobody foresaw this.*runs unplanned"


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("nobody foresaw this")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))


class HandsOver(nn.Module):
    """Its loss is computed outside, so that it is planned after a step was watched."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def gradients_of(model: nn.Module, call: Any, steps: int = 4) -> list[torch.Tensor]:
    x, optimizer = (
        torch.randn(16, 32, generator=torch.Generator().manual_seed(1)),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    for _ in range(steps):
        optimizer.zero_grad()
        call(x).pow(2).mean().backward()
        optimizer.step()
    return [item.detach().clone() for item in model.parameters()]


@pytest.mark.parametrize(
    "broken",
    [
        "variants.profile",
        "session.agreed_plan",
        "session.Session._plan_watched",
        "session.Session._begin_step",
        "session.Session._check_dropped",
    ],
)
def test_a_fault_in_planning_ends_no_training(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HandsOver()
    wanted = gradients_of(plain, plain)
    monkeypatch.setattr(f"remat.pytorch.run.{broken}", fail)
    model = HandsOver()
    with pytest.warns(UserWarning, match=FAILS) as told:
        found = gradients_of(model, remat.optimize(model, "0.9x", progress=False, time_limit=1))
    assert sum("could not be planned" in str(item.message) for item in told) == 1
    assert all(same_bits(left, right) for left, right in zip(wanted, found, strict=True))


@pytest.mark.parametrize("broken", ["variants.profile", "session.Session.known_plan"])
def test_sizes_that_are_left_open_run_on_as_well(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"remat.pytorch.run.{broken}", fail)
    model = small()
    step = remat.optimize(
        lambda x: model(x).pow(2).mean(), "0.9x", progress=False, time_limit=1, dynamic={"batch": (4, 64)}
    )
    found = []
    with pytest.warns(UserWarning, match=FAILS):
        for size in (8, 12, 48):
            model.zero_grad()
            step(torch.ones(size, 32)).backward()
            found.append([item.grad.clone() for item in model.parameters()])
    for size, gradients in zip((8, 12, 48), found, strict=True):
        model.zero_grad()
        model(torch.ones(size, 32)).pow(2).mean().backward()
        assert all(same_bits(left, item.grad) for left, item in zip(gradients, model.parameters(), strict=True))


def test_schedules_that_break_rules_are_faults_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(*args: Any, **kwargs: Any) -> Any:
        raise InvalidSchedule("a value is read before it is there")

    monkeypatch.setattr("remat.pytorch.run.session.agreed_plan", invalid)
    model = HandsOver()
    with pytest.warns(UserWarning, match="InvalidSchedule: a value is read"):
        gradients_of(model, remat.optimize(model, "0.9x", progress=False, time_limit=1))


def test_who_asks_for_a_plan_is_told_of_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remat.pytorch.run.session.agreed_plan", fail)
    with pytest.raises(RuntimeError, match="nobody foresaw this"):
        remat.plan(lambda x: small()(x).pow(2).mean(), torch.ones(16, 32), budget="0.9x")
