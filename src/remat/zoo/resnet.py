"""ResNet-18 and ResNet-50: images of shape (batch, 3, side, side) in, classification loss or logits out.

He et al., "Deep Residual Learning for Image Recognition", with batch norm and in-place ReLU. `width` is the number of
channels of the first stage: 64 in the paper. `shrink` is how much smaller the stem makes the image: 1 is the 3x3 stem
their paper uses on small images, 4 the 7x7 one with pooling that it uses on photographs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from remat.errors import UnknownName
from remat.zoo.example import Example

SIZES_18: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=32, side=32, classes=10, width=8, shrink=1),
    "demo": dict(batch=32, side=112, classes=100, width=64, shrink=4),
}
SIZES_50: Mapping[str, Mapping[str, float]] = {
    "tiny": dict(batch=8, side=32, classes=10, width=8, shrink=1),
    "demo": dict(batch=32, side=64, classes=100, width=64, shrink=4),
}


def _convolve(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out))


def _stem(width: int, shrink: int) -> nn.Sequential:
    if shrink not in (1, 4):
        raise UnknownName(f"There is no ResNet stem that shrinks images by {shrink}; choose 1 or 4.")
    if shrink == 1:
        return nn.Sequential(_convolve(3, width, 3), nn.ReLU(inplace=True))
    return nn.Sequential(_convolve(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


class Residual(nn.Module):
    """`branch(x) + x`, projected where the shapes differ."""

    def __init__(self, branch: nn.Module, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        same = channels_in == channels_out and stride == 1
        self.branch = branch
        self.shortcut = nn.Identity() if same else _convolve(channels_in, channels_out, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.branch(images) + self.shortcut(images), inplace=True)


def _basic(channels_in: int, channels: int, stride: int) -> Residual:
    branch = nn.Sequential(
        _convolve(channels_in, channels, 3, stride), nn.ReLU(inplace=True), _convolve(channels, channels, 3)
    )
    return Residual(branch, channels_in, channels, stride)


def _bottleneck(channels_in: int, channels: int, stride: int) -> Residual:
    branch = nn.Sequential(
        _convolve(channels_in, channels, 1),
        nn.ReLU(inplace=True),
        _convolve(channels, channels, 3, stride),
        nn.ReLU(inplace=True),
        _convolve(channels, 4 * channels, 1),
    )
    return Residual(branch, channels_in, 4 * channels, stride)


class ResNet(nn.Module):
    """`depths` blocks per stage; each stage after the first halves the side and doubles the channels."""

    def __init__(self, *, depths: tuple[int, ...], bottleneck: bool, width: int, classes: int, shrink: int) -> None:
        super().__init__()
        make, expansion = (_bottleneck, 4) if bottleneck else (_basic, 1)
        self.stem = _stem(width, shrink)
        channels_in = width
        stages: list[nn.Module] = []
        for stage, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for block in range(depth):
                blocks.append(make(channels_in, width << stage, 2 if stage > 0 and block == 0 else 1))
                channels_in = expansion * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        features = self.stages(self.stem(images))
        logits = self.head(features.mean(dim=(2, 3)))
        return logits if targets is None else F.cross_entropy(logits, targets)


def example_18(*, batch: int, side: int, classes: int, width: int, shrink: int) -> Example:
    model = ResNet(depths=(2, 2, 2, 2), bottleneck=False, width=width, classes=classes, shrink=shrink)
    return Example(model, (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))))


def example_50(*, batch: int, side: int, classes: int, width: int, shrink: int) -> Example:
    model = ResNet(depths=(3, 4, 6, 3), bottleneck=True, width=width, classes=classes, shrink=shrink)
    return Example(model, (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))))
