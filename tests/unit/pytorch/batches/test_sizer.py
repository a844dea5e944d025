"""Micro-batches within a budget: the gradients of the whole batch, and a measured peak that fits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import remat
from remat.pytorch.measure.measure_step import measure_once


class Classifier(nn.Module):
    def __init__(self, reduction: str = "mean", norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64) if norm else nn.Identity(), nn.GELU(), nn.Linear(64, 64), nn.GELU()
        )
        self.head, self.reduction = nn.Linear(64, 8), reduction

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(x)), y, reduction=self.reduction)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 16, generator=generator), torch.randint(8, (size,), generator=generator)


@pytest.mark.parametrize("size", [256, 253])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_have_the_gradients_of_the_whole_within_the_budget(reduction: str, size: int) -> None:
    model = Classifier(reduction)
    plain = copy.deepcopy(model)
    expected = plain(*batch(size))
    expected.backward()
    sizer = remat.BatchSizer(model, *batch(size), budget="0.6x")
    assert sizer.micro_batches(size) > 1
    found = sizer.step(*batch(size))
    torch.testing.assert_close(found, expected.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    model.zero_grad()
    assert measure_once(sizer.step, *batch(size)).peak_bytes <= sizer.limit.budget_bytes


def test_budget_is_filled() -> None:
    model = Classifier()
    sizer = remat.BatchSizer(model, *batch(256), budget="0.6x")
    count = sizer.micro_batches(256)
    largest = -(-256 // (count - 1))
    assert not sizer.limit.fits(largest, whole=256), "one part less would not fit"


def test_batch_that_fits_is_left_whole_with_the_bits_of_plain() -> None:
    model, plain = Classifier(), Classifier()
    sizer = remat.BatchSizer(model, *batch(64), budget="1.5x")
    expected = plain(*batch(64))
    expected.backward()
    assert [part.weight for part in sizer.split(*batch(64))] == [1.0]
    assert torch.equal(sizer.step(*batch(64)), expected.detach())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_split_gives_every_sample_once() -> None:
    sizer = remat.BatchSizer(Classifier(), *batch(100), budget="0.5x", reduction="mean")
    parts = list(sizer.split(*batch(100)))
    assert torch.equal(torch.cat([part.args[0] for part in parts]), batch(100)[0])
    assert sum(part.weight for part in parts) == pytest.approx(1)
    sizes = {len(part.args[0]) for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_statistics_of_the_batch_are_not_split() -> None:
    sizer = remat.BatchSizer(Classifier(norm=True), *batch(64), budget="0.6x")
    with pytest.raises(remat.RematError, match="cannot be split into micro-batches: it updates buffers"):
        sizer.step(*batch(64))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: remat.BatchSizer(len, budget="1x"), "needs a module"),  # type: ignore[arg-type]
        (lambda: remat.BatchSizer(Classifier(), *batch(8), budget="1x", reduction="max"), "no reduction 'max'"),
        (lambda: remat.BatchSizer(Classifier(), *batch(8), budget="1x").micro_batches(0), "batch of 0 samples"),
        (lambda: remat.BatchSizer(Classifier(), *batch(8), budget=100).micro_batches(8), "that one sample needs"),
    ],
)
def test_bad_input_gets_a_sentence(make: Any, words: str) -> None:
    with pytest.raises(remat.RematError, match=words):
        make()
