"""Batches by tokens: every sample once, none too large, and as many as a budget allows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import remat
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.measure.training_step import TrainingStep


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=80),
    extra=st.integers(0, 200),
    most=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_every_sample_comes_once_and_no_batch_is_too_large(
    lengths: list[int], extra: int, most: int | None, shuffle: bool
) -> None:
    limit = max(1, max(lengths)) + extra
    sampler = remat.MaxTokensSampler(lengths, limit, max_samples=most, shuffle=shuffle)
    batches = list(sampler)
    assert Counter(place for batch in batches for place in batch) == Counter(range(len(lengths)))
    assert all(len(batch) * max(lengths[place] for place in batch) <= limit for batch in batches)
    assert most is None or max(map(len, batches)) <= most
    assert len(sampler) == len(batches)


def test_padding_is_less_than_in_batches_by_number() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(1, 100, (400,)).tolist()
    batches = list(remat.MaxTokensSampler(lengths, 800))
    padded = sum(len(batch) * max(lengths[place] for place in batch) for batch in batches)
    in_order = [range(start, start + 8) for start in range(0, 400, 8)]
    assert padded < 1.1 * sum(lengths)
    assert sum(8 * max(lengths[place] for place in batch) for batch in in_order) > 1.5 * sum(lengths)


def test_epochs_differ_and_can_be_had_again() -> None:
    lengths = [number % 7 + 1 for number in range(100)]
    sampler = remat.MaxTokensSampler(lengths, 21, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert first == list(sampler) != second
    assert len(first) == len(second)


def test_data_loader_takes_it() -> None:
    data = [torch.ones(length) for length in (1, 2, 3, 4, 5, 6)]
    sampler = remat.MaxTokensSampler([len(item) for item in data], 6, shuffle=False)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=nn.utils.rnn.pad_sequence)  # type: ignore[arg-type]
    assert [tuple(batch.shape) for batch in loader] == [(2, 2), (3, 1), (4, 1), (5, 1), (6, 1)]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(40, 32), nn.Linear(32, 32), nn.Linear(32, 40)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        x = x + (self.mix(x) @ x.transpose(1, 2)).softmax(-1) @ x
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


@pytest.mark.slow
def test_batches_fill_a_budget_at_every_length() -> None:
    torch.manual_seed(0)
    model, lengths = Reader(), [8] * 60 + [32] * 60 + [64] * 20
    budget = 4_000_000
    example = torch.randint(40, (8, 64))
    sampler = remat.MaxTokensSampler.fitting(lengths, model, example, budget=budget)
    sizes = sampler.batch_sizes
    assert set(sizes) == {8, 32, 64} and sizes[8] > sizes[32] > sizes[64] >= 1
    for length, size in sizes.items():
        words = torch.randint(40, (size, length))
        assert measure_once(TrainingStep(model, (words,), {})).peak_bytes <= budget
        model.zero_grad()
        more = torch.randint(40, (size + max(1, size // 8), length))
        assert measure_once(TrainingStep(model, (more,), {})).peak_bytes > budget
        model.zero_grad()
    batches = list(sampler)
    assert Counter(place for batch in batches for place in batch) == Counter(range(len(lengths)))
    assert all(len(batch) <= sizes[max(lengths[place] for place in batch)] for batch in batches)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: remat.MaxTokensSampler([], 10), "at least one sample"),
        (lambda: remat.MaxTokensSampler([3, -1], 10), "length is -1"),
        (lambda: remat.MaxTokensSampler([3], 0), "is empty"),
        (lambda: remat.MaxTokensSampler([3, 30], 10), "Sample 1 has 30 tokens, more than the 10"),
        (
            lambda: remat.MaxTokensSampler.fitting(
                [3, 30], Reader(), torch.zeros(2, 4, dtype=torch.long), budget=1000, at_lengths=[10]
            ),
            "longest sample has 30 tokens",
        ),
    ],
)
def test_bad_input_gets_a_sentence(make: Any, words: str) -> None:
    with pytest.raises(remat.RematError, match=words):
        make()
