"""Blocks that are layers: linear, convolution, attention, norm, recurrent, embedding, pooling."""

from __future__ import annotations

from random import Random

import torch
import torch.nn.functional as F
from tests.fuzz.parts import Layout, Part, Sizes, block, mixing, square
from torch import nn


@block(Layout.SEQUENCE)
def linear(choose: Random, sizes: Sizes) -> Part:
    residual = choose.random() < 0.5
    layer = nn.Linear(sizes.width, sizes.width, bias=choose.random() < 0.7)
    return Part(lambda self, x: self.layer(x) + x if residual else self.layer(x), layer=layer)


@block(Layout.SEQUENCE)
def feed_forward(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice((F.gelu, F.relu, F.silu, torch.tanh))
    up, down = nn.Linear(sizes.width, 2 * sizes.width), nn.Linear(2 * sizes.width, sizes.width)
    return Part(lambda self, x: self.down(act(self.up(x))) + x, up=up, down=down)


@block(Layout.SEQUENCE)
def bilinear(choose: Random, sizes: Sizes) -> Part:
    low, layer = nn.Linear(sizes.width, 4), nn.Bilinear(4, 4, sizes.width)
    return Part(lambda self, x: self.layer(self.low(x), self.low(x).tanh()) + x, low=low, layer=layer)


@block(Layout.SEQUENCE)
def conv1d(choose: Random, sizes: Sizes) -> Part:
    dilation, groups = choose.choice((1, 2)), choose.choice((1, 2, sizes.width))
    layer = nn.Conv1d(sizes.width, sizes.width, 3, padding=dilation, dilation=dilation, groups=groups)
    return Part(lambda self, x: self.layer(x.transpose(1, 2)).transpose(1, 2), layer=layer)


@block(Layout.SEQUENCE)
def conv1d_transposed(choose: Random, sizes: Sizes) -> Part:
    layer = nn.ConvTranspose1d(sizes.width, sizes.width, 3, padding=1)
    return Part(lambda self, x: self.layer(x.mT).mT.contiguous() + x, layer=layer)


@block(Layout.IMAGE)
def conv2d(choose: Random, sizes: Sizes) -> Part:
    dilation, groups = choose.choice((1, 2)), choose.choice((1, 4, sizes.width))
    layer = nn.Conv2d(
        sizes.width, sizes.width, 3, padding=dilation, dilation=dilation, groups=groups, bias=choose.random() < 0.5
    )
    act = choose.choice((F.relu, F.silu, nn.Identity()))
    return Part(lambda self, x: act(self.layer(x)), layer=layer)


@block(Layout.IMAGE)
def conv2d_transposed(choose: Random, sizes: Sizes) -> Part:
    layer = nn.ConvTranspose2d(sizes.width, sizes.width, 3, padding=1, groups=choose.choice((1, 2)))
    return Part(lambda self, x: self.layer(x), layer=layer)


@block(Layout.IMAGE)
def conv2d_down_and_up(choose: Random, sizes: Sizes) -> Part:
    mode = choose.choice(("nearest", "bilinear", "bicubic"))
    down = nn.Conv2d(sizes.width, sizes.width, 3, stride=2, padding=1)

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        small = F.relu(self.down(x))
        return F.interpolate(small, size=x.shape[-2:], mode=mode) + x

    return Part(run, down=down)


@block(Layout.IMAGE)
def conv2d_channels_last(choose: Random, sizes: Sizes) -> Part:
    return Part(
        lambda self, x: F.relu(self.layer(x.contiguous(memory_format=torch.channels_last))), layer=mixing(sizes)
    )


@block(Layout.SEQUENCE)
def attention_by_hand(choose: Random, sizes: Sizes) -> Part:
    heads = choose.choice((1, 2, 4))
    q, k, v = square(sizes), square(sizes), square(sizes)
    causal = choose.random() < 0.5

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / 8
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)

    return Part(run, q=q, k=k, v=v)


@block(Layout.SEQUENCE)
def attention_packed(choose: Random, sizes: Sizes) -> Part:
    heads = choose.choice((2, 4))
    rate, causal = choose.choice((0.0, 0.0, 0.2)), choose.random() < 0.5

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal)
        return self.out(mixed.transpose(1, 2).reshape(x.shape)) + x

    return Part(run, packed=nn.Linear(sizes.width, 3 * sizes.width), out=square(sizes))


@block(Layout.SEQUENCE)
def attention_module(choose: Random, sizes: Sizes) -> Part:
    layer = nn.MultiheadAttention(sizes.width, 2, dropout=choose.choice((0.0, 0.1)), batch_first=True)
    weights = choose.random() < 0.5
    return Part(lambda self, x: self.layer(x, x, x, need_weights=weights)[0] + x, layer=layer)


@block(Layout.SEQUENCE)
def transformer_layer(choose: Random, sizes: Sizes) -> Part:
    layer = nn.TransformerEncoderLayer(
        sizes.width,
        2,
        2 * sizes.width,
        dropout=choose.choice((0.0, 0.1)),
        batch_first=True,
        norm_first=choose.random() < 0.5,
    )
    return Part(lambda self, x: self.layer(x), layer=layer)


@block(Layout.SEQUENCE)
def norm_of_width(choose: Random, sizes: Sizes) -> Part:
    make = choose.choice((nn.LayerNorm, nn.RMSNorm))
    affine = choose.random() < 0.7
    return Part(lambda self, x: self.norm(x), norm=make(sizes.width, elementwise_affine=affine))


@block(Layout.SEQUENCE)
def norm_of_transposed(choose: Random, sizes: Sizes) -> Part:
    return Part(
        lambda self, x: self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2) + x,
        norm=nn.LayerNorm(sizes.time),
        layer=square(sizes),
    )


@block(Layout.SEQUENCE)
def batch_norm_between_transposes(choose: Random, sizes: Sizes) -> Part:
    act = choose.choice((F.relu, F.gelu, torch.tanh))
    norm = nn.BatchNorm1d(sizes.width, track_running_stats=choose.random() < 0.7)
    return Part(
        lambda self, x: act(self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2)), norm=norm, layer=square(sizes)
    )


@block(Layout.SEQUENCE)
def batch_norm_of_rows(choose: Random, sizes: Sizes) -> Part:
    return Part(
        lambda self, x: self.norm(self.layer(x).flatten(0, 1)).view(x.shape),
        norm=nn.BatchNorm1d(sizes.width),
        layer=square(sizes),
    )


@block(Layout.IMAGE)
def norm_of_image(choose: Random, sizes: Sizes) -> Part:
    norm = choose.choice(
        (
            lambda: nn.BatchNorm2d(sizes.width),
            lambda: nn.GroupNorm(4, sizes.width),
            lambda: nn.InstanceNorm2d(sizes.width, affine=True),
            lambda: nn.LocalResponseNorm(3),
        )
    )()
    last = choose.random() < 0.4

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return self.norm(x.contiguous(memory_format=torch.channels_last) if last else x)

    return Part(run, norm=norm, layer=mixing(sizes))


@block(Layout.IMAGE)
def residual_image(choose: Random, sizes: Sizes) -> Part:
    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.second(inner) + x, inplace=True)

    return Part(run, first=mixing(sizes), second=mixing(sizes), norm=nn.BatchNorm2d(sizes.width))


@block(Layout.SEQUENCE, on_cpu_only=True)
def recurrent_layer(choose: Random, sizes: Sizes) -> Part:
    make = choose.choice((nn.LSTM, nn.GRU, nn.RNN))
    first, both = choose.random() < 0.6, choose.random() < 0.3
    hidden = sizes.width // 2 if both else sizes.width
    layer = make(sizes.width, hidden, num_layers=choose.choice((1, 1, 2)), batch_first=first, bidirectional=both)

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        # A few moments: each is some ops of its own, and a solver has to look at all of them.
        few = x[:, :5]
        h = self.layer(few)[0] if first else self.layer(few.transpose(0, 1))[0].transpose(0, 1)
        return torch.cat([h, x[:, 5:]], 1)

    return Part(run, layer=layer)


@block(Layout.SEQUENCE)
def recurrent_cell(choose: Random, sizes: Sizes) -> Part:
    make = choose.choice((nn.GRUCell, nn.RNNCell))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for moment in range(3):
            state = self.cell(x[:, moment], state)
            states.append(state)
        return torch.cat([torch.stack(states, 1), x[:, 3:]], 1)

    return Part(run, cell=make(sizes.width, sizes.width))


@block(Layout.SEQUENCE)
def embedding_of_signs(choose: Random, sizes: Sizes) -> Part:
    table = nn.Embedding(7, sizes.width, padding_idx=choose.choice((None, 0)))
    return Part(lambda self, x: x + self.table((x[..., 0].detach() * 3).long().clamp(0, 6)), table=table)


@block(Layout.SEQUENCE)
def embedding_bag(choose: Random, sizes: Sizes) -> Part:
    table = nn.EmbeddingBag(9, sizes.width, mode=choose.choice(("mean", "sum", "max")))

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x[..., 0].detach() * 4).long().clamp(0, 8)).unsqueeze(1)

    return Part(run, table=table)


@block(Layout.SEQUENCE)
def sparse_embedding(choose: Random, sizes: Sizes) -> Part:
    table = nn.Embedding(50, sizes.width, sparse=True)
    return Part(lambda self, x: x + self.table((x[..., 0].detach() * 9).long().clamp(0, 49)), table=table)


@block(Layout.IMAGE)
def pooling(choose: Random, sizes: Sizes) -> Part:
    pool = choose.choice(
        (
            nn.MaxPool2d(3, 1, 1),
            nn.AvgPool2d(3, 1, 1),
            nn.MaxPool2d(2, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.AdaptiveMaxPool2d(2),
            nn.LPPool2d(2, 2),
        )
    )

    def run(self: Part, x: torch.Tensor) -> torch.Tensor:
        small = self.pool(F.relu(self.layer(x)))
        return F.interpolate(small, size=x.shape[-2:]) + x

    return Part(run, pool=pool, layer=mixing(sizes))


@block(Layout.SEQUENCE)
def pooling_of_time(choose: Random, sizes: Sizes) -> Part:
    pool = choose.choice((nn.MaxPool1d(3, 1, 1), nn.AvgPool1d(3, 1, 1)))
    return Part(
        lambda self, x: self.pool(self.layer(x).transpose(1, 2)).transpose(1, 2), pool=pool, layer=square(sizes)
    )


@block(Layout.IMAGE)
def padding(choose: Random, sizes: Sizes) -> Part:
    mode = choose.choice(("constant", "reflect", "replicate", "circular"))
    layer = nn.Conv2d(sizes.width, sizes.width, 3)
    return Part(lambda self, x: self.layer(F.pad(x, (1, 1, 1, 1), mode=mode)), layer=layer)


@block(Layout.IMAGE)
def pixel_shuffle(choose: Random, sizes: Sizes) -> Part:
    layer = nn.Conv2d(sizes.width, 4 * sizes.width, 1)
    return Part(lambda self, x: F.pixel_unshuffle(F.pixel_shuffle(self.layer(x), 2), 2)[:, ::4], layer=layer)
