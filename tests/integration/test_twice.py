"""Gradients that are differentiated again are plain PyTorch's, though planned backwards cannot be."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import remat
from remat.pytorch.run.gradients import twice
from remat.pytorch.run.gradients.twice import PlainGraph

ROWS, WIDTH = 64, 16
AGAIN = "differentiated again"


class Critic(nn.Module):
    def __init__(self, norm: bool = False, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 32),
            nn.BatchNorm1d(32) if norm else nn.Identity(),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x)
        return scores


class Forces(nn.Module):
    """Energies and their gradients, which forward asks for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        energy = self.critic(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.pow(2).mean() + force.pow(2).mean()


class Halved(nn.Module):
    """Its backward does not need what its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.critic(x / 2).mean()
        return loss


def penalty(critic: Any) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean() - critic(torch.randn(ROWS, WIDTH)).mean()


def gradient_norm(critic: Any) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        loss = critic(x).float().pow(2).mean()
    gradients = torch.autograd.grad(loss, list(critic.parameters()), create_graph=True)
    return sum((gradient.pow(2).sum() for gradient in gradients), torch.zeros(()))


def forces(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(ROWS, WIDTH))
    return loss


def trained(model: nn.Module, called: Any, loss_of: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    """Losses of a few steps, and parameters and buffers after them."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for _ in range(3):
        loss = loss_of(called)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(item.detach() for item in (*model.parameters(), *model.buffers()))]


def trained_both_ways(
    plain: nn.Module, loss_of: Callable[[Any], torch.Tensor], **how: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = copy.deepcopy(plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(model, remat.optimize(model, "64MiB", progress=False, **how), loss_of)
    # A penalty is asked of one graph, and only there is it told.
    assert sum(AGAIN in str(item.message) for item in caught) == 1
    return trained(plain, plain, loss_of), found


@pytest.mark.parametrize("norm", [False, True])
def test_gradient_penalty_trains_to_the_same_bits(norm: bool) -> None:
    expected, found = trained_both_ways(Critic(norm), penalty)
    assert all(map(torch.equal, expected, found))


def test_gradients_asked_for_inside_forward_are_differentiated() -> None:
    # The planned backward and autograd's both reach each parameter, and their sum is rounded once more.
    for one, other in zip(*trained_both_ways(Forces(), forces), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_gradients_under_autocast_are_differentiated() -> None:
    for one, other in zip(*trained_both_ways(Critic(), gradient_norm), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4)


def test_compiled_steps_have_their_gradients_differentiated() -> None:
    expected, found = trained_both_ways(Critic(dropout=0.0), penalty, compiler="inductor")
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (F.dropout, True),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: F.rrelu(x, training=True), True),
        (torch.tanh, False),
    ],
)
def test_what_draws_random_numbers_is_known(function: Callable[[torch.Tensor], torch.Tensor], draws: bool) -> None:
    class Step(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    assert PlainGraph(symbolic_trace(Step())).draws is draws


def test_generator_is_not_asked_for_its_state_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert twice.state_of("cuda") is None
    assert twice.state_of("cpu") is not None


def test_batch_is_held_no_longer_than_without() -> None:
    model = remat.optimize(Halved(), "64MiB", progress=False)
    model(torch.randn(ROWS, WIDTH)).backward()
    batch = torch.randn(ROWS, WIDTH)
    loss = model(batch)
    gone = weakref.ref(batch)
    del batch
    assert gone() is None
    loss.backward()


def test_buffer_that_is_read_before_it_is_updated_is_not_guessed() -> None:
    class Averaging(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(torch.tanh(x - self.mean))
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return found

    model = remat.optimize(Averaging(), "64MiB", progress=False)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again .*: it reads a buffer that it updates"):
            (gradient.sum() + x.sum()).backward()


def test_data_that_is_gone_is_told_only_where_gradients_are_differentiated() -> None:
    model = remat.optimize(Halved(), "64MiB", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.grad(model(torch.randn(ROWS, WIDTH)), list(model.parameters()), create_graph=True)
        with pytest.raises(RuntimeError, match="a tensor that it was given is gone"):
            torch.stack([item.sum() for item in found]).sum().backward()


def test_compiled_masks_are_not_drawn_anew_for_gradients_of_gradients() -> None:
    model = remat.optimize(Critic(), "64MiB", progress=False, compiler="inductor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="random numbers of its own"):
            penalty(model).backward()
