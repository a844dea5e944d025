"""Blocks that work element by element or along one dimension: activations, softmax, dropout, noise, other dtypes."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from tests.fuzz.parts import Layout, Part, Sizes, block, square
from torch import nn

ACTIVATIONS = (
    F.relu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.silu,
    F.selu,
    F.elu,
    F.celu,
    F.hardtanh,
    F.relu6,
    F.leaky_relu,
    F.softplus,
    F.softsign,
    F.mish,
    F.hardswish,
    F.hardsigmoid,
    F.logsigmoid,
    F.tanhshrink,
    F.softshrink,
    F.hardshrink,
    lambda x: F.threshold(x, 0.1, -1.0),
    torch.sigmoid,
    torch.tanh,
    torch.sin,
    torch.abs,
    lambda x: x.clamp(-1, 1),
    lambda x: x.clamp_min(0.0),
    lambda x: x.square(),
    lambda x: (x.square() + 1).sqrt(),
    lambda x: (x.square() + 1).log(),
    lambda x: (-x.square()).exp(),
    lambda x: (x.abs() + 1).reciprocal(),
    lambda x: (x.abs() + 0.5).rsqrt(),
    lambda x: (x.abs() + 0.5).pow(1.7),
    lambda x: x.erf(),
    lambda x: torch.where(x > 0, x, x * 0.5),
    lambda x: torch.lerp(x, x.tanh(), 0.3),
    lambda x: torch.addcmul(x, x.tanh(), x.sigmoid(), value=0.5),
    lambda x: torch.maximum(x, x.roll(1, -1)),
    lambda x: torch.atan2(x, x.abs() + 1),
)
"""Functions of one tensor that keep its shape."""


@block(Layout.SEQUENCE)
def activation(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice(ACTIVATIONS)
    return Part(lambda self, x: act(self.layer(x)), layer=square(sizes))


@block(Layout.ANY)
def activation_alone(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice(ACTIVATIONS)
    return Part(lambda self, x: act(x))


@block(Layout.SEQUENCE)
def activation_of_transposed(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice(ACTIVATIONS)
    return Part(lambda self, x: act(self.layer(x).transpose(1, 2)).transpose(1, 2) + x, layer=square(sizes))


@block(Layout.SEQUENCE)
def activation_of_slices(choose: Random, sizes: Sizes) -> Part:
    one, two = choose.choice(ACTIVATIONS), choose.choice(ACTIVATIONS)

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        wide = self.layer(x)
        return one(wide[..., ::2]) + two(wide[..., 1::2])

    return Part(run, layer=nn.Linear(sizes.width, 2 * sizes.width))


@block(Layout.SEQUENCE)
def glu(choose: Random, sizes: Sizes) -> Part:
    dim = choose.choice((-1, 1))
    grow = nn.Linear(sizes.width, 2 * sizes.width)

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        if dim == -1:
            return F.glu(self.grow(x), -1)
        return F.glu(torch.cat([x, self.grow(x)[..., : x.shape[-1]]], 1), 1)

    return Part(run, grow=grow)


@block(Layout.SEQUENCE)
def prelu(choose: Random, sizes: Sizes) -> Part:
    act = nn.PReLU(choose.choice((1, sizes.time)))
    return Part(lambda self, x: self.act(self.layer(x)), act=act, layer=square(sizes))


@block(Layout.SEQUENCE)
def softmax_along(choose: Random, sizes: Sizes) -> Part:
    dim, function = choose.choice((0, 1, 2)), choose.choice((F.softmax, F.log_softmax, F.softmin))
    return Part(lambda self, x: function(self.layer(x), dim=dim) * x, layer=square(sizes))


@block(Layout.SEQUENCE)
def softmax_then_transpose(choose: Random, sizes: Sizes) -> Part:
    dim, function = choose.choice((1, 2)), choose.choice((F.softmax, F.log_softmax))
    before = choose.random() < 0.7

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        h = function(h.transpose(1, 2), dim=dim).transpose(1, 2) if before else function(h, dim=dim)
        return self.layer(h)

    return Part(run, layer=square(sizes))


@block(Layout.IMAGE)
def softmax_of_image(choose: Random, sizes: Sizes) -> Part:
    dim, function = choose.choice((1, 2, 3)), choose.choice((F.softmax, F.log_softmax))
    last = choose.random() < 0.5
    layer = nn.Conv2d(sizes.width, sizes.width, 1)

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x.contiguous(memory_format=torch.channels_last) if last else x)
        return function(h, dim=dim) + x

    return Part(run, layer=layer)


@block(Layout.SEQUENCE)
def log_sum_exp(choose: Random, sizes: Sizes) -> Part:
    dim = choose.choice((0, 1, 2))
    return Part(lambda self, x: x - self.layer(x).logsumexp(dim, keepdim=True), layer=square(sizes))


@block(Layout.SEQUENCE)
def dropout(choose: Random, sizes: Sizes) -> Part:
    rate, transposed = choose.choice((0.1, 0.5)), choose.random() < 0.3

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return F.dropout(h.mT, rate).mT + x if transposed else F.dropout(h, rate) + x

    return Part(run, layer=square(sizes))


@block(Layout.ANY)
def dropout_of_kinds(choose: Random, sizes: Sizes) -> Part:
    kind = choose.choice((nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.Dropout1d(0.2)))
    if isinstance(kind, nn.Dropout1d):
        return Part(lambda self, x: self.kind(x.flatten(2)).view(x.shape), kind=kind)
    return Part(lambda self, x: self.kind(x), kind=kind)


@block(Layout.IMAGE)
def dropout_of_channels(choose: Random, sizes: Sizes) -> Part:
    return Part(lambda self, x: self.drop(x), drop=nn.Dropout2d(0.3))


@block(Layout.ANY)
def noise(choose: Random, sizes: Sizes) -> Part:
    draw = choose.choice(
        (
            lambda x: torch.randn_like(x),
            lambda x: torch.rand(x.shape, device=x.device),
            lambda x: torch.bernoulli(torch.full_like(x, 0.7)),
            lambda x: torch.empty_like(x).uniform_(-1, 1),
        )
    )
    multiply = choose.random() < 0.5
    return Part(lambda self, x: x * draw(x) if multiply else x + 0.1 * draw(x))


@block(Layout.ANY)
def noise_by_gate(choose: Random, sizes: Sizes) -> Part:
    return Part(lambda self, x: x * torch.bernoulli(x.sigmoid()).detach() + x.mul(0.1))


@block(Layout.SEQUENCE)
def double_precision(choose: Random, sizes: Sizes) -> Part:
    return Part(lambda self, x: torch.tanh(self.layer(x.double())).to(x.dtype), layer=square(sizes).double())


@block(Layout.SEQUENCE)
def half_precision(choose: Random, sizes: Sizes) -> Part:
    return Part(
        lambda self, x: F.gelu(self.layer(x.to(torch.bfloat16))).to(x.dtype) + x, layer=square(sizes).bfloat16()
    )


@block(Layout.SEQUENCE)
def autocast_region(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = F.softmax(self.layer(F.gelu(self.layer(x))), -1)
        return h.to(x.dtype) + x

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def complex_numbers(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.exp(1j * pairs.abs())).flatten(-2)

    return Part(run)
