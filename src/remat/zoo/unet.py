"""A U-Net: images of shape (batch, 3, side, side) in, per-pixel loss or logits out.

Ronneberger et al., "U-Net", with padded convolutions and batch norm. Its skip connections stay live across most of
the step, which is what makes it hard for strategies that cut the model into consecutive pieces.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.zoo.example import Example

SIZES: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=8, side=48, classes=4, width=8, depth=3),
    "demo": dict(batch=16, side=96, classes=8, width=16, depth=4),
}


def _convolve_twice(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, *, classes: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(_convolve_twice, [3, *widths[:-2]], widths[:-1]))
        self.bottom = _convolve_twice(widths[-2], widths[-1])
        ascending = list(reversed(widths))
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(below, here, 2, stride=2) for below, here in zip(ascending, ascending[1:], strict=False)
        )
        self.up = nn.ModuleList(_convolve_twice(2 * here, here) for here in ascending[1:])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        skips: list[Tensor] = []
        features = images
        for down in self.down:
            features = down(features)
            skips.append(features)
            features = F.max_pool2d(features, 2)
        features = self.bottom(features)
        for grow, up in zip(self.grow, self.up, strict=True):
            features = up(torch.cat([skips.pop(), grow(features)], dim=1))
        logits = self.head(features)
        return logits if targets is None else F.cross_entropy(logits, targets)


def example(*, batch: int, side: int, classes: int, width: int, depth: int) -> Example:
    model = UNet(classes=classes, width=width, depth=depth)
    return Example(model, (torch.randn(batch, 3, side, side), torch.randint(classes, (batch, side, side))))
