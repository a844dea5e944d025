"""Losses: each kind makes a target for features of a shape, and a number from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Head:
    """`target` is made from the shape `[..., width]` that features have in the end; `loss` gets features and target."""

    target: Callable[[tuple[int, ...]], torch.Tensor]
    loss: Callable[[str], Loss]
    """From a reduction to the loss; where that is "none", its mean is taken."""


def _real(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape)


def _none(shape: tuple[int, ...]) -> torch.Tensor:
    """As small as can be: the loss does not read it."""
    return torch.zeros(1)


def _share(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape)


def _signs(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(shape).round() * 2 - 1


def _classes(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(shape[-1], shape[:-1])


def _row_signs(shape: tuple[int, ...]) -> torch.Tensor:
    return _signs(shape[:-1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, -2)


def _pointwise(function: Callable[..., Any], change: Callable[..., Any] | None = None) -> Callable[[str], Loss]:
    def of(reduction: str) -> Loss:
        def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return function(change(x) if change else x, target, reduction=reduction).mean()

        return loss

    return of


def _cross_entropy(**options: float) -> Callable[[str], Loss]:
    return lambda reduction: (
        lambda x, target: F.cross_entropy(_rows(x), target.flatten(), reduction=reduction, **options).mean()
    )


def _nll(reduction: str) -> Loss:
    return lambda x, target: F.nll_loss(F.log_softmax(_rows(x), -1), target.flatten(), reduction=reduction).mean()


def _over_classes_first(reduction: str) -> Loss:
    return lambda x, target: F.cross_entropy(x.movedim(-1, 1), target, reduction=reduction).mean()


def _kl_div(reduction: str) -> Loss:
    name = "batchmean" if reduction == "mean" else reduction
    return lambda x, target: F.kl_div(F.log_softmax(x, -1), target.softmax(-1), reduction=name).mean()


def _cosine_embedding(reduction: str) -> Loss:
    return lambda x, target: F.cosine_embedding_loss(
        _rows(x), _rows(x).roll(1, 0).detach(), target.flatten(), reduction=reduction
    ).mean()


def _triplet(reduction: str) -> Loss:
    return lambda x, target: F.triplet_margin_loss(_rows(x), _rows(target), _rows(x).tanh(), reduction=reduction).mean()


def _margin(reduction: str) -> Loss:
    return lambda x, target: F.multi_margin_loss(_rows(x), target.flatten(), reduction=reduction).mean()


def _gaussian(reduction: str) -> Loss:
    return lambda x, target: F.gaussian_nll_loss(x, target, target.square() + 1, reduction=reduction).mean()


HEADS: dict[str, Head] = {
    "square": Head(_none, lambda reduction: lambda x, target: x.square().mean()),
    "sum": Head(_real, lambda reduction: lambda x, target: (x * target).sum() / 100),
    "mse": Head(_real, _pointwise(F.mse_loss)),
    "l1": Head(_real, _pointwise(F.l1_loss)),
    "smooth l1": Head(_real, _pointwise(F.smooth_l1_loss)),
    "huber": Head(_real, _pointwise(F.huber_loss)),
    "bce": Head(_share, _pointwise(F.binary_cross_entropy, torch.sigmoid)),
    "bce with logits": Head(_share, _pointwise(F.binary_cross_entropy_with_logits)),
    "soft margin": Head(_signs, _pointwise(F.soft_margin_loss)),
    "hinge embedding": Head(_signs, _pointwise(F.hinge_embedding_loss)),
    "poisson": Head(_share, _pointwise(F.poisson_nll_loss, torch.tanh)),
    "gaussian": Head(_real, _gaussian),
    "cross entropy": Head(_classes, _cross_entropy()),
    "cross entropy, smoothed": Head(_classes, _cross_entropy(label_smoothing=0.1)),
    "cross entropy, classes first": Head(_classes, _over_classes_first),
    "nll": Head(_classes, _nll),
    "kl": Head(_real, _kl_div),
    "cosine embedding": Head(_row_signs, _cosine_embedding),
    "triplet": Head(_real, _triplet),
    "multi margin": Head(_classes, _margin),
}


def choose_reduction(choose: Random) -> str:
    return choose.choice(("mean", "mean", "sum", "none"))
