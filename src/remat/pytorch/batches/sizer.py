"""`BatchSizer`: the batch that was asked for, in as few micro-batches as fit a budget.

In: a model that returns its loss, a batch, and a budget. Out: a step that runs forward and backward in micro-batches of
nearly equal size, with the gradients of the whole batch up to the order of additions. How large they may be is
predicted before anything runs. Whether the loss is a mean or a sum over the batch is found out by comparing a few
samples, as for `remat.guarded`, unless it is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget
from remat.errors import RematError
from remat.pytorch.batches.limits import BatchLimit, batch_limit
from remat.pytorch.guard.parts import Batch, CannotSplit, Reduction, find_reduction, parse_reduction, spans
from remat.pytorch.guard.rollback import StepFacts
from remat.pytorch.run.optimize import listed
from remat.zoo.example import Example


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a batch, and what its loss counts in the whole's."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    weight: float
    """Multiply the loss by this before backward."""


class BatchSizer:
    """Splits batches into the fewest micro-batches that fit `budget`.

    `model(*args, **kwargs)` returns the scalar loss; the arguments given here are an example, whose tensors are cut or
    repeated along dimension 0. The budget bounds the whole step: bytes, "8GiB", "80%" of the device, or "0.5x" of the
    plain peak of the example. `optimizer` reserves its state. `reduction` is "mean", "sum" or found out.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        budget: str | int | float | Budget,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        reduction: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise RematError(f"A BatchSizer needs a module that returns its loss, not a {type(model).__name__}.")
        self._model, self._budget = model, parse_budget(budget)
        self._optimizers = tuple(listed(optimizer))
        self._example: Example | None = Example(model, args, kwargs)
        self._reduction = parse_reduction(reduction)
        self._counts: dict[int, int] = {}

    @cached_property
    def limit(self) -> BatchLimit:
        """The curve of the plain peak over the batch, captured when it is first needed."""
        assert self._example is not None, "the curve is made once"
        example, self._example = self._example, None
        return batch_limit(example, self._budget, lambda model: self._optimizers)

    def micro_batches(self, size: int) -> int:
        """Into how many parts a batch of `size` samples is split."""
        if size < 1:
            raise RematError(f"A batch of {size} samples cannot be split; give one or more.")
        if size not in self._counts:
            self._counts[size] = 1 if self.limit.fits(size) else self._parts(size)
        return self._counts[size]

    def _parts(self, size: int) -> int:
        most = self.limit.largest(max(1, size // 2), whole=size)
        return -(-size // most)

    def split(self, *args: Any, **kwargs: Any) -> Iterator[MicroBatch]:
        """The micro-batches of a batch, for a loop of your own."""
        batch = Batch(args, kwargs)
        count = self.micro_batches(batch.size)
        if count == 1:
            yield MicroBatch(args, kwargs, 1.0)
            return
        mean = self._found_reduction(batch) is Reduction.MEAN
        for start, stop in spans(batch.size, count):
            part = batch.cut(start, stop)
            weight = (stop - start) / batch.size if mean else 1.0
            yield MicroBatch(tuple(part.args), part.kwargs, weight)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a batch; returns its loss, without a graph, and leaves its gradients."""
        total: torch.Tensor | None = None
        for part in self.split(*args, **kwargs):
            loss = self._model(*part.args, **part.kwargs)
            if part.weight != 1.0:
                loss = loss * part.weight
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a batch has a part"
        return total

    def _found_reduction(self, batch: Batch) -> Reduction:
        if self._reduction is None:
            before = StepFacts(self._model).before((), {})
            try:
                self._reduction = find_reduction(self._run, batch, before)
            except CannotSplit as error:
                raise CannotSplit(f"This batch cannot be split into micro-batches: {error}.") from None
        return self._reduction

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._model(*args, **kwargs).backward()
