"""Blocks that gather, sort, scan, transform and contract."""

from __future__ import annotations

from random import Random

import torch
from tests.fuzz.parts import Layout, Part, Sizes, block, square
from torch import nn


@block(Layout.SEQUENCE)
def gather(choose: Random, sizes: Sizes) -> Part:
    pick = choose.choice(
        (
            lambda h, i: h.gather(1, i.view(1, -1, 1).expand_as(h)),
            lambda h, i: h.index_select(1, i),
            lambda h, i: h[:, i],
            lambda h, i: torch.take_along_dim(h, h.detach().argsort(-1), -1),
        )
    )
    return Part(lambda self, x: pick(self.layer(x), self.order), layer=square(sizes), order=torch.randperm(sizes.time))


@block(Layout.SEQUENCE)
def scatter_out_of_place(choose: Random, sizes: Sizes) -> Part:
    put = choose.choice(
        (
            lambda h, x, i: h.index_add(1, i, x),
            lambda h, x, i: h.scatter_add(1, i.view(1, -1, 1).expand_as(x), x),
            lambda h, x, i: h.scatter_reduce(1, i.view(1, -1, 1).expand_as(x), x, "amax"),
            lambda h, x, i: h.select_scatter(x[:, 0], 1, 1),
            lambda h, x, i: h.slice_scatter(x[:, ::2], 1, 0, None, 2),
        )
    )
    order = torch.arange(sizes.time - 1, -1, -1)
    return Part(lambda self, x: put(self.layer(x), x, self.order), layer=square(sizes), order=order)


@block(Layout.SEQUENCE)
def scan(choose: Random, sizes: Sizes) -> Part:
    dim = choose.choice((1, 2))
    accumulate = choose.choice(
        (
            lambda x: x.cumsum(dim) / 8,
            lambda x: x.tanh().cumprod(dim),
            lambda x: x.cummax(dim).values,
            lambda x: x.logcumsumexp(dim),
            lambda x: torch.diff(x, dim=dim, prepend=torch.zeros_like(x.narrow(dim, 0, 1))),
        )
    )
    return Part(lambda self, x: accumulate(self.layer(x)), layer=square(sizes))


@block(Layout.SEQUENCE)
def order(choose: Random, sizes: Sizes) -> Part:
    dim = choose.choice((1, 2))
    arrange = choose.choice(
        (
            lambda x: x.sort(dim).values,
            lambda x: x - x.topk(2, dim).values.sum(dim, keepdim=True),
            lambda x: x - x.max(dim, keepdim=True).values,
            lambda x: x - x.amin(dim, keepdim=True),
            lambda x: x - x.median(dim, keepdim=True).values,
            lambda x: x - x.kthvalue(2, dim, keepdim=True).values,
            lambda x: x / (x.norm(dim=dim, keepdim=True) + 1),
            lambda x: (x - x.mean(dim, keepdim=True)) / (x.std(dim, keepdim=True) + 1),
            lambda x: x / (x.var(dim, keepdim=True) + 1),
        )
    )
    return Part(lambda self, x: arrange(self.layer(x)), layer=square(sizes))


@block(Layout.SEQUENCE)
def contraction(choose: Random, sizes: Sizes) -> Part:
    contract = choose.choice(
        (
            lambda x, w: torch.einsum("btd,de->bte", x, w),
            lambda x, w: torch.einsum("btd,bsd->bts", x, x) @ x / x.shape[1],
            lambda x, w: torch.bmm(x, w.expand(x.shape[0], -1, -1)),
            lambda x, w: torch.baddbmm(x, x, w.expand(x.shape[0], -1, -1)),
            lambda x, w: torch.tensordot(x, w, dims=([2], [0])),
            lambda x, w: torch.matmul(x.transpose(1, 2).transpose(1, 2), w.t()),
            lambda x, w: torch.addmm(x.flatten(0, 1), x.flatten(0, 1), w).view(x.shape),
            lambda x, w: torch.linalg.multi_dot([x.flatten(0, 1), w, w]).view(x.shape),
        )
    )
    weight = nn.Parameter(torch.randn(sizes.width, sizes.width) / sizes.width**0.5)
    return Part(lambda self, x: contract(x, self.weight), weight=weight)


@block(Layout.SEQUENCE)
def frequencies(choose: Random, sizes: Sizes) -> Part:
    transform = choose.choice(
        (
            lambda x: torch.fft.fft(x, dim=1).real,
            lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1),
            lambda x: torch.fft.fft2(x).real / x.shape[1],
        )
    )
    return Part(lambda self, x: transform(self.layer(x)), layer=square(sizes))


@block(Layout.SEQUENCE)
def distances(choose: Random, sizes: Sizes) -> Part:
    measure = choose.choice(
        (
            lambda x, y: torch.cdist(x, y),
            lambda x, y: nn.functional.cosine_similarity(x.unsqueeze(2), y.unsqueeze(1), dim=-1),
            lambda x, y: nn.functional.normalize(x, dim=-1) @ nn.functional.normalize(y, dim=1).mT,
        )
    )
    return Part(lambda self, x: measure(self.layer(x), x) @ x / x.shape[1], layer=square(sizes))


@block(Layout.SEQUENCE)
def mapped_over_batch(choose: Random, sizes: Sizes) -> Part:
    def one(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(row @ weight) + row

    return Part(
        lambda self, x: torch.func.vmap(one, in_dims=(0, None))(x, self.weight),
        weight=nn.Parameter(torch.randn(sizes.width, sizes.width) / sizes.width**0.5),
    )


@block(Layout.SEQUENCE)
def one_hot_routing(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        route = self.gate(x).softmax(-1)
        chosen = nn.functional.one_hot(route.argmax(-1), 2).to(x.dtype)
        left, right = (route * chosen).unbind(-1)
        return self.left(x) * left.unsqueeze(-1) + self.right(x) * right.unsqueeze(-1)

    return Part(run, gate=nn.Linear(sizes.width, 2), left=square(sizes), right=square(sizes))
