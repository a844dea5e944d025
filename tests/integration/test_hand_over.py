"""Optimizers inside backward: gradients that hooks use up are not in memory together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.pytorch.measure.measure_step import measure_once

WIDTH = 64
Loss = Callable[[nn.Module], torch.Tensor]
X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x.square().mean()


class Tied(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layers[-1](x))


def build(make: Callable[[Any], torch.optim.Optimizer], *, uses_up: bool = True, kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    model = kind()
    optimizers = {parameter: make([parameter]) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "a hook is called once, when the gradient is there"
        optimizers[parameter].step()
        if uses_up:
            optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def trained(model: Any, loss: Loss, steps: int = 4) -> list[float]:
    found = []
    for _ in range(steps):
        value = loss(model)
        value.backward()
        found.append(value.item())
    return found


def of_output(model: nn.Module) -> torch.Tensor:
    return model(X)


def with_penalty(model: nn.Module) -> torch.Tensor:
    return model(X) + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters())


def called_twice(model: nn.Module) -> torch.Tensor:
    return model(X) + model(X.flip(0))


@pytest.mark.parametrize("kind", [Net, Tied])
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("budget", ["1x", "0.75x"])
def test_gradients_that_are_used_up_are_counted_as_they_are(make: Any, budget: str, kind: type[Net]) -> None:
    plain, model = build(make, kind=kind), build(make, kind=kind)
    trained(plain, of_output, 2)
    peak = measure_once(lambda: of_output(plain).backward()).peak_bytes
    step = remat.optimize(model, budget, time_limit=1, progress=False)
    trained(step, of_output, 2)
    measured = measure_once(lambda: of_output(step).backward()).peak_bytes
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    plan = remat.plan_of(step)
    assert plan.plain_peak_bytes == pytest.approx(peak, rel=0.02)
    assert measured <= plan.budget_bytes
    assert trained(step, of_output) == trained(plain, of_output)


@pytest.mark.parametrize("loss", [with_penalty, called_twice])
def test_gradient_that_others_add_to_waits_for_them(loss: Loss) -> None:
    plain, model = build(sgd), build(sgd)
    step = remat.optimize(model, "1x", time_limit=0.5, progress=False)
    assert trained(step, loss) == trained(plain, loss)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_gradients_asked_for_are_returned_and_no_hook_is_called() -> None:
    plain, model = build(sgd), build(sgd)
    step = remat.optimize(model, "1x", time_limit=0.5, progress=False)
    for _ in range(2):
        wanted = torch.autograd.grad(of_output(plain), list(plain.parameters()))
        found = torch.autograd.grad(of_output(step), list(model.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert trained(step, of_output) == trained(plain, of_output)


def test_hook_that_leaves_the_gradient_is_told_once_and_planned_for() -> None:
    plain, model = build(sgd, uses_up=False), build(sgd, uses_up=False)
    step = remat.optimize(model, "1x", time_limit=0.5, progress=False)
    with pytest.warns(UserWarning, match="leaves the gradient") as heard:
        losses = trained(step, of_output)
    assert losses == trained(plain, of_output)
    assert sum("leaves the gradient" in str(item.message) for item in heard) == 1
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and torch.equal(one.grad, other.grad)


def test_parameter_is_not_written_to_while_something_reads_it() -> None:
    from remat.core.graph import OpId
    from remat.pytorch.run.gradients.hand_over import delayed

    steps = [OpId(number) for number in (0, 1, 5, 2, 3, 1, 4)]
    assert delayed(steps, {OpId(5): {OpId(1)}}) == (0, 1, 2, 3, 1, 5, 4)
    assert delayed(steps, {OpId(5): {OpId(0)}}) == tuple(steps)
    assert delayed(steps, {}) == tuple(steps)
