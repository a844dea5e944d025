"""A linear layer and the cross entropy of its outputs, computed for some rows at a time.

Logits are by far the largest tensors of a language model: rows x vocabulary, held three times around the loss. Here
each chunk of rows gets its logits and its share of the loss and of the gradients of hidden states, weight and bias at
once, so that only one chunk of logits exists at a time; backward scales the gradients. No matrix product is computed
twice. The loop is unrolled and made of plain ops, which the compiler sees and fuses; how the gradients are added up and
kept in the forward is in `loss_ops`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from remat.inductor.loss import ops as loss_ops  # noqa: F401  defines the ops

Reduction = Literal["mean", "sum"]

_ALIGNED_COLUMNS = 8
_PADDED_COLUMNS = 64
_ROWS_OF_A_GOOD_CHUNK = 2048

PointwiseStep = tuple[Literal["times", "over", "tanh", "plus"], float]
"""What happens to each of the logits before the loss: an op and its number; `plus` adds `shift` and has none."""


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """How a loss is computed: in how many chunks, with which arguments of `F.cross_entropy` and in which types."""

    chunks: int
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    logits_dtype: torch.dtype
    loss_dtype: torch.dtype
    vocabulary_multiple: int
    pointwise: tuple[PointwiseStep, ...] = ()

    @property
    def float_dtype(self) -> torch.dtype:
        """The type of the softmax and of sums over rows."""
        return torch.promote_types(self.logits_dtype, torch.float32)


@torch.compiler.allow_in_graph
def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    divisor: Tensor | float | None = None,
    shift: Tensor | None = None,
    *,
    chunks: int,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    logits_dtype: torch.dtype | None = None,
    loss_dtype: torch.dtype | None = None,
    vocabulary_multiple: int | None = None,
    pointwise: Sequence[PointwiseStep] = (),
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), labels, ...) / divisor`, with one chunk of logits at a time.

    Between the two, `pointwise` steps may scale the logits, cap them or add `shift`, which has one number for each of
    the vocabulary and gets no gradient.

    `hidden` is (..., width), `weight` (vocabulary, width), `labels` (...). Logits are computed in `logits_dtype`
    (autocast's type where it is on), everything after them in float32 or wider. The vocabulary is filled up with
    columns that take no part to a multiple of `vocabulary_multiple`; None lets the device decide.
    """
    device = hidden.device.type
    dtype = logits_dtype or _linear_dtype(hidden, weight)
    settings = ChunkSettings(
        chunks=chunks,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        logits_dtype=dtype,
        loss_dtype=loss_dtype or (torch.float32 if torch.is_autocast_enabled(device) else dtype),
        vocabulary_multiple=vocabulary_multiple or _vocabulary_multiple(weight.shape[0], dtype, device),
        pointwise=tuple((name, number) for name, number in pointwise),
    )
    rows = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(device, enabled=False):
        return _ChunkedLoss.apply(rows, weight, bias, labels.reshape(-1), divisor, shift, settings)


def choose_chunks(rows: int, vocabulary: int, dtype: torch.dtype, *, limit_bytes: int | None = None) -> int:
    """The smallest number of chunks whose logits take at most `limit_bytes` each.

    Each chunk reads and writes all gradients of the weight once more, so few chunks are fast. Without a limit, chunks
    have about as many rows as keep that below a tenth of the time of the matrix products. Numbers that divide the rows
    evenly are preferred: chunks of one shape share their kernels.
    """
    row_bytes = vocabulary * dtype.itemsize
    most_rows = _ROWS_OF_A_GOOD_CHUNK if limit_bytes is None else max(1, limit_bytes // row_bytes)
    needed = max(1, -(-rows // most_rows))
    even = (count for count in range(needed, needed + needed // 4 + 1) if rows % count == 0)
    return next(even, needed)


def chunk_bytes(rows: int, vocabulary: int, dtype: torch.dtype, chunks: int) -> int:
    """The logits of the largest of `chunks` chunks."""
    return -(-rows // chunks) * vocabulary * dtype.itemsize


def _linear_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype)


def _vocabulary_multiple(vocabulary: int, dtype: torch.dtype, device: str) -> int:
    """Tensor cores read 16 bytes at a time; a vocabulary like 50257 would make them read one number at a time."""
    awkward = device == "cuda" and dtype.itemsize == 2 and vocabulary % _ALIGNED_COLUMNS != 0
    return _PADDED_COLUMNS if awkward else 1


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in forward; backward multiplies by the gradient that arrives."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor | float | None,
        shift: Tensor | None,
        settings: ChunkSettings,
    ) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.vocabulary = weight.shape[0]
        ctx.set_materialize_grads(False)
        total, sums = _compute(hidden, weight, bias, labels, shift, settings, ctx.needs_input_grad[:3])
        count, valid = _count(labels, divisor, settings)
        # Rows without a label have no gradient, also where none has one and the mean is not a number.
        ctx.save_for_backward(torch.where(valid > 0, 1 / count, 0), *sums)
        return (total / count).to(settings.loss_dtype)

    @staticmethod
    def backward(ctx: Any, *loss_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (loss_grad,) = loss_grads
        if loss_grad is None:
            return (None,) * 7
        scale, hidden_grad, weight_grad, bias_grad = ctx.saved_tensors
        kept = hidden_grad, _without_filling(weight_grad, ctx.vocabulary), _without_filling(bias_grad, ctx.vocabulary)
        scale = scale * loss_grad
        scaled = (
            None if grad is None else (grad.to(scale.dtype) * scale).to(dtype)
            for grad, dtype in zip(kept, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)


def _without_filling(grad: Tensor | None, vocabulary: int) -> Tensor | None:
    return grad if grad is None or grad.shape[0] == vocabulary else grad[:vocabulary]


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shift: Tensor | None,
    settings: ChunkSettings,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The sum of all rows' losses and its gradients by hidden states, weight and bias, where wanted.

    The sum's gradients, not the mean's: a probability less one is close to a number that bfloat16 has, while one
    divided by a number of rows is not, and its error would be in every row.
    """
    vocabulary = weight.shape[0]
    # Gradients that are rounded to half precision once they have been scaled must not be rounded before.
    hidden_grad_dtype = settings.logits_dtype if hidden.dtype.itemsize > 2 else settings.float_dtype
    hidden = _stored(hidden, settings.logits_dtype)
    weight, bias = (_filled_up(tensor, settings) for tensor in (weight, bias))
    if shift is not None:
        shift = _stored(shift.reshape(-1), settings.float_dtype, weight.shape[0])
    columns = torch.arange(weight.shape[0], device=weight.device)
    # Looking labels up among the columns changes none, but refuses those out of range, as `cross_entropy` does.
    valid = labels != settings.ignore_index
    targets = _stored(columns[:vocabulary][torch.where(valid, labels, 0)])
    mask = _stored(valid, settings.float_dtype)
    total = _stored(hidden.new_zeros(1, dtype=settings.float_dtype))
    dtypes = hidden_grad_dtype, settings.float_dtype, settings.float_dtype
    sums: tuple[Tensor | None, ...] | None = None
    for start, stop in _bounds(hidden.shape[0], settings.chunks):
        chunk = hidden[start:stop]
        logits = chunk @ weight.t() if bias is None else torch.addmm(bias, chunk, weight.t())
        # Copies of these few numbers let chunks of one size share their kernel.
        rows = _stored(targets[start:stop]), _stored(mask[start:stop])
        losses, logits_grad = _loss_of_rows(logits, *rows, shift, vocabulary, settings)
        total = total + losses
        # Once the first chunk's logits are gone: compiled code takes memory where the graph says.
        sums = sums or _empty_sums((hidden, weight, bias), dtypes, wanted)
        if any(wanted):
            torch.ops.remat.add_linear_grads(*sums, mask, total, logits_grad, hidden, weight, start)
    return total.squeeze(), sums or _empty_sums((hidden, weight, bias), dtypes, wanted)


def _stored(tensor: Tensor, dtype: torch.dtype | None = None, rows: int | None = None) -> Tensor:
    return torch.ops.remat.stored(tensor, dtype or tensor.dtype, tensor.shape[0] if rows is None else rows)


def _filled_up(tensor: Tensor | None, settings: ChunkSettings) -> Any:
    """In the type of the logits, with zeros at the end of the vocabulary; itself where that changes nothing."""
    if tensor is None:
        return None
    rows = tensor.shape[0] + -tensor.shape[0] % settings.vocabulary_multiple
    unchanged = tensor.dtype == settings.logits_dtype and rows == tensor.shape[0] and tensor.is_contiguous()
    return tensor if unchanged else _stored(tensor, settings.logits_dtype, rows)


def _count(labels: Tensor, divisor: Tensor | float | None, settings: ChunkSettings) -> tuple[Tensor, Tensor]:
    """What the sum over rows is divided by, and how many rows have a label."""
    valid = (labels != settings.ignore_index).sum().to(settings.float_dtype)
    count = valid if settings.reduction == "mean" else torch.ones_like(valid)
    return count if divisor is None else count * divisor, valid


def _empty_sums(
    likes: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    # The first chunk writes them, if there is one.
    make = torch.empty if likes[0] is not None and likes[0].shape[0] > 0 else torch.zeros
    return tuple(
        make(like.shape, dtype=dtype, device=like.device) if want and like is not None else None
        for like, dtype, want in zip(likes, dtypes, wanted, strict=True)
    )


def _bounds(rows: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Chunks of one size, and one smaller chunk at the end where that does not come out even."""
    size = max(1, -(-rows // chunks))
    return ((start, min(start + size, rows)) for start in range(0, rows, size))


def _loss_of_rows(
    logits: Tensor, targets: Tensor, mask: Tensor, shift: Tensor | None, vocabulary: int, settings: ChunkSettings
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of rows whose mask is 1, and its gradient by the logits."""
    wide, slope = _after_steps(logits.to(settings.float_dtype), shift, settings.pointwise)
    smoothing = settings.label_smoothing
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = columns == targets[:, None]
    real = columns < vocabulary if logits.shape[1] != vocabulary else None
    if real is not None:
        wide = torch.where(real, wide, -torch.inf)
    largest = wide.amax(1, keepdim=True)
    shifted = wide - largest
    log_sum = shifted.exp().sum(1, keepdim=True).log()
    # A masked sum instead of a lookup: it is part of the pass that finds the sum of exponentials.
    of_target = torch.where(is_target, wide, 0).sum(1) - largest.squeeze(1)
    losses = log_sum.squeeze(1) - of_target
    expected = is_target.to(wide.dtype)
    if smoothing:
        of_all = _sum_of_real(wide, real) / vocabulary - largest.squeeze(1)
        losses = (1 - smoothing) * losses + smoothing * (log_sum.squeeze(1) - of_all)
        expected = (1 - smoothing) * expected + smoothing / vocabulary
        expected = expected if real is None else torch.where(real, expected, 0)
    grad = ((shifted - log_sum).exp() - expected) * mask[:, None]
    grad = grad if slope is None else grad * slope
    return torch.where(mask == 0, 0, losses).sum(), grad.to(settings.logits_dtype)


def _after_steps(
    logits: Tensor, shift: Tensor | None, steps: Sequence[PointwiseStep]
) -> tuple[Tensor, Tensor | float | None]:
    """What the loss sees of the logits, and the share of its gradient by that which reaches them; None is all of it."""
    slope: Tensor | float | None = None
    for name, number in steps:
        if name == "plus":
            assert shift is not None
            logits = logits + shift
            continue
        if name == "tanh":
            logits = logits.tanh()
            factor: Tensor | float = 1 - logits * logits
        else:
            logits = logits * number if name == "times" else logits / number
            factor = number if name == "times" else 1 / number
        slope = factor if slope is None else slope * factor
    return logits, slope


def _sum_of_real(wide: Tensor, real: Tensor | None) -> Tensor:
    return (wide if real is None else torch.where(real, wide, 0)).sum(1)
