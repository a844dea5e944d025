"""`MaxTokensSampler`: batches of samples of like length, each as large as its tokens allow.

In: the length of every sample, and how many tokens a batch may have, padding included; or a model and a budget, from
which the largest batch at several lengths is predicted. Out: lists of indices for a `DataLoader`'s `batch_sampler`.
Every sample comes once in each epoch; the same seed and epoch give the same batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.utils.data import Sampler

from remat.core.budget import Budget, parse_budget
from remat.errors import RematError
from remat.pytorch.batches.limits import batch_limit
from remat.pytorch.explore.resize import resized, size_along
from remat.pytorch.run.optimize import listed
from remat.zoo.example import Example

MOST_LENGTHS = 4
"""Lengths at which the largest batch is predicted, unless told otherwise."""


class MaxTokensSampler(Sampler[list[int]]):
    """Batches whose longest sample, times their number, is at most `max_tokens`; `max_samples` bounds their number.

    With `shuffle`, batches come in a new order and with other neighbours in each epoch that `set_epoch` names.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        _check(lengths, max_tokens, max_samples)
        self._lengths, self._seed, self._shuffle = list(lengths), seed, shuffle
        self._max_tokens, self._max_samples = max_tokens, max_samples
        self._sizes: dict[int, int] = {}
        """Samples in a batch by length, where they were predicted."""
        self._steps: list[int] = []
        self._epoch = 0
        for place, length in enumerate(lengths):
            if length > max_tokens:
                raise RematError(
                    f"Sample {place} has {length} tokens, more than the {max_tokens} that a batch may have; cut it, "
                    "leave it out, or allow more."
                )

    @classmethod
    def fitting(
        cls,
        lengths: Sequence[int],
        model: nn.Module,
        *args: Any,
        budget: str | int | float | Budget,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        at_lengths: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ) -> Self:
        """As many samples of each length as fit `budget` when `model`, which returns its loss, trains on them.

        The arguments are an example batch: dimension 0 is the sample, dimension 1 the token. Batches are predicted at
        `at_lengths`, or a few that the samples have; what lies between counts as the next longer one.
        """
        _check(lengths, 1, None)
        steps = sorted(set(at_lengths or _usual_lengths(lengths)))
        if steps[-1] < max(lengths):
            raise RematError(
                f"The longest sample has {max(lengths)} tokens and at_lengths ends at {steps[-1]}; go on to it."
            )
        sizes = _largest_batches(Example(model, args, kwargs), steps, parse_budget(budget), optimizer)
        most = max(length * size for length, size in sizes.items())
        sampler = cls(lengths, max(most, steps[-1]), shuffle=shuffle, seed=seed)
        sampler._sizes, sampler._steps = sizes, steps
        return sampler

    @property
    def batch_sizes(self) -> Mapping[int, int]:
        """Samples in a batch by its longest one's length, where a budget set them; others count as the next longer."""
        return dict(self._sizes)

    def set_epoch(self, epoch: int) -> None:
        """Batches of the next iteration are those of this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return sum(1 for _ in self._packed(sorted(range(len(self._lengths)), key=self._lengths.__getitem__)))

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        count = len(self._lengths)
        order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        # Sorting keeps the order of equals, which is a new one in each epoch.
        batches = list(self._packed(sorted(order, key=self._lengths.__getitem__)))
        places = torch.randperm(len(batches), generator=generator).tolist() if self._shuffle else range(len(batches))
        return (batches[place] for place in places)

    def _packed(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Neighbours in the order together, as many as the longest of them, which is the last, allows."""
        batch: list[int] = []
        for place in order:
            if batch and len(batch) + 1 > self._most_samples(self._lengths[place]):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _most_samples(self, length: int) -> int:
        if self._steps:
            most = self._sizes[self._steps[bisect_left(self._steps, length)]]
        else:
            most = self._max_tokens // max(1, length)
        return most if self._max_samples is None else min(most, self._max_samples)


def _check(lengths: Sequence[int], max_tokens: int, max_samples: int | None) -> None:
    if not len(lengths):
        raise RematError("A MaxTokensSampler needs the length of at least one sample; it was given none.")
    if min(lengths) < 0:
        raise RematError(f"A sample's length is {min(lengths)}; lengths are zero or more.")
    if max_tokens < 1 or (max_samples is not None and max_samples < 1):
        raise RematError(f"A batch of {max_tokens} tokens or {max_samples} samples is empty; allow one or more.")


def _usual_lengths(lengths: Sequence[int]) -> list[int]:
    """The longest, and others at equal shares of the samples."""
    ordered = sorted(lengths)
    return [max(2, ordered[(number + 1) * len(ordered) // MOST_LENGTHS - 1]) for number in range(MOST_LENGTHS)]


def _largest_batches(example: Example, steps: Sequence[int], budget: Budget, optimizer: Any) -> dict[int, int]:
    guess, sizes = size_along(example, "batch"), {}
    allowed: Budget | None = None
    for length in reversed(steps):
        limit = batch_limit(resized(example, "length", length), allowed or budget, lambda model: listed(optimizer))
        # A share of the plain peak is one of the longest samples' step: the same bytes for all.
        allowed = allowed or parse_budget(limit.budget_bytes)
        sizes[length] = guess = limit.largest(guess)
    return dict(sorted(sizes.items()))
