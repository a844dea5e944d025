"""Blocks about what surrounds ops: hooks, checkpoints, custom gradients, parametrizations, state, control flow."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tests.fuzz.parts import Layout, Part, Sizes, block, square
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@block(Layout.SEQUENCE)
def checkpointed(choose: Random, sizes: Sizes) -> Part:
    rate = choose.choice((0.0, 0.2))

    def inner(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(layer(F.gelu(layer(x)))), rate)

    return Part(lambda self, x: checkpoint(inner, self.layer, x, use_reentrant=False) + x, layer=square(sizes))


@block(Layout.SEQUENCE)
def forward_hooks(choose: Random, sizes: Sizes) -> Part:
    layer = square(sizes)
    layer.register_forward_hook(lambda module, args, result: result * 2)
    if choose.random() < 0.5:
        layer.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
    return Part(lambda self, x: self.layer(x), layer=layer)


@block(Layout.SEQUENCE)
def backward_hooks(choose: Random, sizes: Sizes) -> Part:
    layer = square(sizes)

    def halve(gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else gradient * 0.5

    layer.register_full_backward_hook(lambda module, inputs, outputs: tuple(map(halve, inputs)))
    return Part(lambda self, x: self.layer(x.tanh()), layer=layer)


@block(Layout.SEQUENCE)
def tensor_hooks(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return h

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def parameter_hooks(choose: Random, sizes: Sizes) -> Part:
    layer = square(sizes)
    layer.weight.register_hook(lambda gradient: gradient * 2)
    return Part(lambda self, x: self.layer(x), layer=layer)


class Swish(torch.autograd.Function):
    """x times its sigmoid, with a gradient by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * (gate + x * gate * (1 - gate))


class Straight(torch.autograd.Function):
    """The sign of x, whose gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@block(Layout.SEQUENCE)
def custom_function(choose: Random, sizes: Sizes) -> Part:
    function = choose.choice((Swish, Straight))
    return Part(lambda self, x: function.apply(self.layer(x)) + x, layer=square(sizes))


@block(Layout.SEQUENCE)
def tied_weights(choose: Random, sizes: Sizes) -> Part:
    first, second = square(sizes), square(sizes)
    second.weight = first.weight
    return Part(
        lambda self, x: F.linear(self.second(self.first(x).relu()), self.first.weight.t()), first=first, second=second
    )


@block(Layout.SEQUENCE)
def frozen_weights(choose: Random, sizes: Sizes) -> Part:
    layer = square(sizes)
    layer.weight.requires_grad_(False)
    if choose.random() < 0.5:
        layer.bias.requires_grad_(False)
    return Part(lambda self, x: F.gelu(self.layer(x)), layer=layer)


@block(Layout.SEQUENCE)
def parametrized_weights(choose: Random, sizes: Sizes) -> Part:
    wrap = choose.choice((parametrizations.spectral_norm, parametrizations.weight_norm))
    return Part(lambda self, x: self.layer(x), layer=wrap(square(sizes)))


@block(Layout.SEQUENCE)
def old_style_weight_norm(choose: Random, sizes: Sizes) -> Part:
    gain = nn.Parameter(torch.ones(sizes.width, 1))
    weight = nn.Parameter(torch.randn(sizes.width, sizes.width))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, torch._weight_norm(self.weight, self.gain, 0))

    return Part(run, gain=gain, weight=weight)


@block(Layout.SEQUENCE)
def counting_buffer(choose: Random, sizes: Sizes) -> Part:
    change = choose.choice((lambda m: m.mul_(1.5), lambda m: m.add_(1.0), lambda m: m.copy_(m * 0.5 + 1)))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        change(self.m)
        return self.layer(x) * self.m

    return Part(run, layer=square(sizes), m=torch.ones(1))


@block(Layout.SEQUENCE)
def running_average(choose: Random, sizes: Sizes) -> Part:
    reads_before = choose.random() < 0.5

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        shifted = h - self.mean if reads_before else h
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
        return shifted if reads_before else h - self.mean

    return Part(run, layer=square(sizes), mean=torch.zeros(sizes.width))


@block(Layout.SEQUENCE)
def replaced_buffer(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        self.last = h.detach().mean((0, 1))
        return h + self.last

    return Part(run, layer=square(sizes), last=torch.zeros(sizes.width))


@block(Layout.SEQUENCE)
def guard_by_item(choose: Random, sizes: Sizes) -> Part:
    limit = choose.choice((1e9, 1e9, 1e9, 0.0))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        if h.norm().item() > limit:
            h = h / 2
        return h.relu()

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def scale_by_item(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return h / (1.0 + h.detach().abs().mean().item())

    return Part(run, layer=square(sizes))


@block(Layout.ANY)
def break_of_the_graph(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = x.sigmoid()
        torch._dynamo.graph_break()
        return h * x

    return Part(run)


@block(Layout.SEQUENCE)
def selected_rows(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        # As many rows each time: another number would be captured anew at every step.
        rows = x[..., 0] > x[..., 0].median() if x.numel() else x[..., 0] > 0
        h = torch.zeros_like(x)
        h[rows] = self.layer(x[rows])
        return h + x

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def counting_integer(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps.add_(1)
        return self.layer(x) * (1.0 / (1.0 + self.steps))

    return Part(run, layer=square(sizes), steps=torch.zeros((), dtype=torch.long))
