"""Buffers that forward writes to, whose old contents no backward must miss, and buffers that it replaces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import remat

pytestmark = pytest.mark.usefixtures("quick_kernels")

WIDTH = 32


def halved(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    module.m.copy_(module.m * 0.5 + 1)
    return h * module.m


def through_a_view(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    scale = (module.m.view(8, -1) * 2).view(-1)
    module.m.add_(1)
    return h * scale


def through_a_slice(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    half = module.m[: WIDTH // 2].sin()
    module.m[:10].add_(1)
    return h * torch.cat([half, half])


def counted(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    module.count.mul_(1.5)
    return h * module.count


def of_the_size_of_activations(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    mixed = (module.large.view(-1).sin() * 2).view_as(module.large).tanh()
    module.large.add_(1)
    return h * mixed


KINDS = (halved, through_a_view, through_a_slice, counted, of_the_size_of_activations)


class Updating(nn.Module):
    def __init__(self, use: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("m", torch.ones(WIDTH))
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("large", torch.ones(128, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.use(self, self.layers[0](x))
        h = torch.relu(self.layers[1](h)) * 1.5
        return self.layers[2](h.sin()).square().mean()


def trained(use: Callable, budget: str | None, compiler: str | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module, x = Updating(use), torch.randn(128, WIDTH)
    step = module if budget is None else remat.optimize(module, budget, compiler=compiler)
    found = []
    for _ in range(2):
        module.zero_grad()
        step(x).backward()
        found += [parameter.grad.clone() for parameter in module.parameters()]
    return [*found, module.m.clone(), module.large.clone()]


@pytest.mark.parametrize("budget", ["1x", "0.8x", "0.7x"])
@pytest.mark.parametrize("use", KINDS, ids=lambda use: use.__name__)
def test_eager(use, budget: str) -> None:
    try:
        found = trained(use, budget)
    except remat.InfeasibleBudget as refusal:
        found = trained(use, str(int(1.01 * refusal.min_budget)))
    assert all(map(torch.equal, found, trained(use, None)))


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1x", "0.7x"])
@pytest.mark.parametrize("use", KINDS, ids=lambda use: use.__name__)
def test_compiled(use, budget: str) -> None:
    try:
        found = trained(use, budget, "inductor")
    except remat.InfeasibleBudget as refusal:
        found = trained(use, str(int(1.01 * refusal.min_budget)), "inductor")
    for item, wanted in zip(found, trained(use, None), strict=True):
        assert (item - wanted).abs().max() <= 1e-5 * wanted.abs().max()


class Replacing(nn.Module):
    """Its buffer is in single precision until autocast has computed one: it is captured again in the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[1](self.layers[0](x))
        self.last = h.detach().mean(0)
        return self.layers[2](h + self.last)


def test_step_that_is_captured_again_while_it_is_watched_is_not_planned_by_its_tracing() -> None:
    torch.manual_seed(0)
    module, x = Replacing(), torch.randn(128, WIDTH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    optimized = remat.optimize(module, "1x", progress=False)
    for _ in range(4):
        step(optimized)
    plain = remat.measure(step, module).peak_bytes
    assert remat.plan_of(optimized).plain_peak_bytes == pytest.approx(plain, rel=0.02)
    assert remat.measure(step, optimized).peak_bytes <= 1.02 * plain
