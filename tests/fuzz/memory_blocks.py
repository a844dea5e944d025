"""Blocks about who shares memory with whom: views, slices, strides, concatenations, writing in place."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from tests.fuzz.parts import Layout, Part, Sizes, block, mixing, square
from torch import nn


@block(Layout.SEQUENCE)
def views(choose: Random, sizes: Sizes) -> Part:
    turn = choose.choice(
        (
            lambda x: x.transpose(1, 2).contiguous().view(x.shape),
            lambda x: x.flip(1),
            lambda x: x.roll(3, 1),
            lambda x: x.reshape(x.shape[0], -1).unflatten(1, x.shape[1:]),
            lambda x: x.unfold(1, 1, 1).squeeze(-1),
            lambda x: x.narrow(1, 0, 1).expand_as(x) + x,
            lambda x: x.movedim(1, 0).clone().movedim(0, 1),
            lambda x: x.permute(2, 0, 1).relu().permute(1, 2, 0),
            lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -1, device=x.device)],
            lambda x: x.repeat(1, 1, 2)[..., ::2],
            lambda x: x.repeat_interleave(2, 1)[:, ::2],
            lambda x: x.diagonal_scatter(x.diagonal(dim1=1, dim2=2) * 2, dim1=1, dim2=2),
            lambda x: torch.tril(x),
            lambda x: x.swapaxes(0, 1).swapaxes(0, 1),
        )
    )
    return Part(lambda self, x: turn(self.layer(x)), layer=square(sizes))


@block(Layout.SEQUENCE)
def strides_by_hand(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x).contiguous()
        batch, time, width = h.shape
        return h.as_strided((batch, time, width), (time * width, width, 1)) * 2 - x

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def sliding_windows(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice((F.relu, torch.sigmoid, F.gelu))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        windows = F.pad(self.layer(x), (0, 0, 1, 1)).unfold(1, 3, 1)
        return act(windows).mean(-1)

    return Part(run, layer=square(sizes))


@block(Layout.IMAGE)
def patches(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        columns = F.unfold(self.layer(x), 3, padding=1)
        return F.fold(columns.tanh(), x.shape[-2:], 3, padding=1) / 9

    return Part(run, layer=mixing(sizes))


@block(Layout.SEQUENCE)
def chunks_and_cat(choose: Random, sizes: Sizes) -> Part:
    dim = choose.choice((1, 2))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[dim] // 2
        left, right = self.layer(x).narrow(dim, 0, 2 * half).chunk(2, dim)
        return torch.cat([left.sigmoid() * right, x.narrow(dim, half, x.shape[dim] - half)], dim)

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def split_and_stack(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        parts = self.layer(x).split(x.shape[-1] // 4, -1)
        return torch.stack([part.tanh() for part in reversed(parts)], -1).flatten(-2)

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def expanded_sum(choose: Random, sizes: Sizes) -> Part:
    return Part(
        lambda self, x: self.layer(x) * x.mean(1, keepdim=True).expand_as(x) + self.row.expand(x.shape[0], -1, -1),
        layer=square(sizes),
        row=nn.Parameter(torch.randn(1, sizes.time, sizes.width)),
    )


@block(Layout.SEQUENCE)
def activation_in_place(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice(
        (
            torch.relu_,
            F.relu6,
            torch.selu_,
            lambda x: F.elu_(x),
            lambda x: F.leaky_relu_(x, 0.1),
            lambda x: F.hardtanh_(x),
            lambda x: F.silu(x, inplace=True),
            lambda x: F.hardswish(x, inplace=True),
            lambda x: F.threshold_(x, 0.0, -0.5),
            torch.sigmoid_,
            torch.tanh_,
        )
    )
    return Part(lambda self, x: act(self.layer(x)), layer=square(sizes))


@block(Layout.ANY)
def in_place_on_what_comes_in(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice((torch.relu_, lambda x: x.add_(1.0), lambda x: x.mul_(0.5)))
    return Part(lambda self, x: act(x) * 2)


@block(Layout.SEQUENCE)
def arithmetic_in_place(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice(
        (
            lambda h, x: h.add_(x).mul_(0.5),
            lambda h, x: h.sub_(1.0).div_(3.0),
            lambda h, x: h.mul_(x.detach()).clamp(-3, 3),
            lambda h, x: h.addcmul_(x, x, value=0.1),
            lambda h, x: h.masked_fill_(x > 0, 0.25),
            lambda h, x: h.copy_(x) + h.neg(),
            lambda h, x: h.lerp_(x, 0.3),
            lambda h, x: h.zero_() + x,
            lambda h, x: h.transpose(1, 2).add_(x.transpose(1, 2)).transpose(1, 2),
        )
    )
    return Part(lambda self, x: act(self.layer(x), x), layer=square(sizes))


@block(Layout.SEQUENCE)
def slices_in_place(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice(
        (
            lambda h, x: h[:, ::2].mul_(2.0),
            lambda h, x: h[:, 1:].copy_(x[:, :-1]),
            lambda h, x: h[..., 0].fill_(0.0),
            lambda h, x: h.narrow(-1, 0, 4).add_(x.narrow(-1, 4, 4)),
            lambda h, x: h.select(1, 0).relu_(),
            lambda h, x: h.view(-1)[:5].zero_() if h.numel() else h,
        )
    )

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x).contiguous()
        act(h, x)
        return h

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def fill_a_new_tensor(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros_like(x)
        h[:, ::2] = self.layer(x[:, ::2])
        h[:, 1::2] = x[:, 1::2].tanh()
        return h

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def indices_in_place(choose: Random, sizes: Sizes) -> Part:
    time = sizes.time
    act = choose.choice(
        (
            lambda h, x, i: h.index_add_(1, i, x),
            lambda h, x, i: h.index_copy_(1, i, x),
            lambda h, x, i: h.index_fill_(1, i[:3], 0.5),
            lambda h, x, i: h.scatter_(1, i.view(1, -1, 1).expand_as(x), x),
            lambda h, x, i: h.scatter_add_(1, i.view(1, -1, 1).expand_as(x), x),
            lambda h, x, i: h.index_put_((torch.zeros_like(i), i), x[0]) if len(h) else h,
            lambda h, x, i: h.masked_scatter_(x > 0, x.detach().exp()),
        )
    )
    return Part(lambda self, x: act(self.layer(x), x, self.order), layer=square(sizes), order=torch.randperm(time))


@block(Layout.SEQUENCE)
def detached_branch(choose: Random, sizes: Sizes) -> Part:
    return Part(lambda self, x: self.layer(x) * x.detach() + self.layer(x.detach()).detach(), layer=square(sizes))


@block(Layout.SEQUENCE)
def region_without_gradients(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.layer(x).abs().mean(-1, keepdim=True) + 1
        return self.layer(x) / scale

    return Part(run, layer=square(sizes))


@block(Layout.SEQUENCE)
def one_layer_many_times(choose: Random, sizes: Sizes) -> Part:
    return Part(lambda self, x: F.silu(self.layer(F.silu(self.layer(x)))) + self.layer(x), layer=square(sizes))


@block(Layout.SEQUENCE)
def unused_work(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        self.other(x).softmax(-1)
        return self.layer(x)

    return Part(run, layer=square(sizes), other=square(sizes))
