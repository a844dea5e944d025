"""A step in parts of its batch, with the gradients of the whole.

In: how to run the step for some arguments. Out: the same gradients, added up over parts that need less memory each, and
the results put together. That is right only where the loss is a mean or a sum over the samples of the batch, which is
found out by comparing a few samples at once with the same in halves: batch statistics, random numbers and losses with
weights of their own do not pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from remat.errors import RematError
from remat.pytorch.guard.memory_errors import is_out_of_memory, let_go_of
from remat.pytorch.guard.rollback import Before
from remat.pytorch.measure.optimizer_steps import unwatch_optimizers, watch_optimizers
from remat.pytorch.reach import tensors_within

MOST_CHECKED = 4
"""Samples that are compared at once and in halves."""
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 3e-2
"""Of the gradient's norm: the order of additions differs."""


class Reduction(StrEnum):
    """How a loss comes from those of the samples."""

    MEAN = "mean"
    SUM = "sum"


def parse_reduction(text: str | None) -> Reduction | None:
    """ "mean", "sum", or None for one that is to be found out."""
    if text is not None and text not in tuple(Reduction):
        raise RematError(f'There is no reduction {text!r}; write "mean" or "sum", or leave it out.')
    return None if text is None else Reduction(text)


class CannotSplit(RematError):
    """A step whose batch cannot be run in parts."""


class _OptimizerStepped(Exception):
    """Ends a trial before an optimizer changes anything."""


Run = Callable[[Sequence[Any], Mapping[str, Any]], Any]
"""Forward and backward for some arguments."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of a step, and how many samples they hold."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Of the first tensor that has dimensions; 0 where none has."""
        found = (len(item) for item in tensors_within((list(self.args), dict(self.kwargs))) if item.dim())
        return next(found, 0)

    def cut(self, start: int, stop: int) -> Batch:
        """Samples `start` to `stop`; what has another size along dimension 0 stays whole."""
        args, kwargs = cut_value((list(self.args), dict(self.kwargs)), start, stop, self.size)
        return Batch(args, kwargs)


def cut_value(value: Any, start: int, stop: int, size: int) -> Any:
    """The same with every tensor of `size` samples cut."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and len(value) == size else value
    if isinstance(value, dict):
        return {key: cut_value(item, start, stop, size) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [cut_value(item, start, stop, size) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def spans(size: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` parts of `size` samples, the first of them one larger where it does not divide."""
    start = 0
    for number in range(count):
        stop = start + size // count + (number < size % count)
        yield start, stop
        start = stop


def run_in_parts(run: Run, batch: Batch, count: int, before: Before, reduction: Reduction) -> Any:
    """Run the step in `count` parts; the gradients are then those of the whole, added to what there was."""
    gradients, size = before.gradients, batch.size
    gradients.set_aside()
    results, last = [], 0
    for start, stop in spans(size, count):
        length = stop - start
        if last and last != length and reduction is Reduction.MEAN:
            _scale(before.parameters, last / length)
        part = batch.cut(start, stop)
        results.append((length, run(part.args, part.kwargs)))
        if not last and not gradients.were_complete():
            raise CannotSplit("it runs several backwards, some of which had added to gradients that were there before")
        last = length
    if reduction is Reduction.MEAN:
        _scale(before.parameters, last / size)
    gradients.put_together()
    return put_together([result for _, result in results], [length for length, _ in results], reduction)


def _scale(parameters: Sequence[torch.Tensor], factor: float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def put_together(results: Sequence[Any], lengths: Sequence[int], reduction: Reduction) -> Any:
    """Results of parts as one: losses by the reduction, samples one after the other."""
    first = results[0]
    if isinstance(first, torch.Tensor) and first.dim() and all(map(_has_length, results, lengths)):
        return torch.cat(list(results))
    if isinstance(first, (torch.Tensor, int, float)) and not isinstance(first, bool):
        total = sum(lengths) if reduction is Reduction.MEAN else 1
        weights = [length / total if reduction is Reduction.MEAN else 1 for length in lengths]
        return sum(result * weight for result, weight in zip(results, weights, strict=True))
    if isinstance(first, dict):
        return type(first)((key, put_together([item[key] for item in results], lengths, reduction)) for key in first)
    if isinstance(first, (list, tuple)):
        items = [put_together(found, lengths, reduction) for found in zip(*results, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if all(item is first or item == first for item in results):
        return first
    raise CannotSplit(f"it returns a {type(first).__name__}, which cannot be put together from parts")


def _has_length(result: torch.Tensor, length: int) -> bool:
    return len(result) == length


def find_reduction(run: Run, batch: Batch, before: Before) -> Reduction:
    """Whether the loss is a mean or a sum, by trying a few samples; raises `CannotSplit` where it is neither."""
    count = min(MOST_CHECKED, batch.size // 2 * 2)
    if count < 2:
        raise CannotSplit("its batch has fewer than two samples")
    try:
        whole = _trial(run, batch.cut(0, count), before)
        parts = [_trial(run, batch.cut(*span), before) for span in spans(count, 2)]
    except _OptimizerStepped:
        raise CannotSplit("it calls an optimizer; guard forward and backward alone") from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        let_go_of(error)
        raise CannotSplit(f"not even {count} samples of it fit") from None
    added = {key: sum(part[key] for part in parts if key in part) for key in {*parts[0], *parts[1]}}
    tolerance = max((_tolerance(item) for item in whole.values()), default=TOLERANCE)
    for reduction, factor in ((Reduction.MEAN, 0.5), (Reduction.SUM, 1.0)):
        if whole.keys() == added.keys() and _distance(whole, added, factor) <= tolerance:
            return reduction
    raise CannotSplit(
        "its loss is neither the mean nor the sum of its samples' losses, or it draws random numbers; if it is one of "
        'these all the same, say so with reduction="mean" or "sum"'
    )


def _trial(run: Run, batch: Batch, before: Before) -> dict[int, torch.Tensor]:
    """Gradients by parameter; nothing of the run stays."""
    before.gradients.set_aside()
    watcher = _Refusing()
    watch_optimizers(watcher)
    try:
        run(batch.args, batch.kwargs)
        if before.buffers.written(by_value=True):
            raise CannotSplit("it updates buffers, as batch normalization does, for which halves are not the whole")
        return {place: item.grad for place, item in enumerate(before.parameters) if item.grad is not None}
    finally:
        unwatch_optimizers(watcher)
        before.restore()


def _distance(whole: Mapping[int, torch.Tensor], added: Mapping[int, Any], factor: float) -> float:
    """The norm of what is missing, as a share of the whole's; infinite where there is no gradient to compare."""
    norm = sum(_square(item) for item in whole.values())
    missed = sum(_square(item - factor * added[place]) for place, item in whole.items())
    return math.sqrt(missed / norm) if norm > 0 else math.inf


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().sum())


def _tolerance(tensor: torch.Tensor) -> float:
    return LOW_PRECISION_TOLERANCE if tensor.dtype in (torch.float16, torch.bfloat16) else TOLERANCE


class _Refusing:
    def optimizer_began(self, optimizer: Any) -> None:
        raise _OptimizerStepped("A trial ends before an optimizer steps.")

    def optimizer_returned(self, optimizer: Any) -> None:
        """Does not happen."""
