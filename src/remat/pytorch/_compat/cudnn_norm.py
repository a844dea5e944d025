"""cuDNN's batch norm, which eager runs on CUDA, as an op that tracing can hold.

The kernel updates the running statistics without saying so, so tracing takes torch's own kernel in its place, which
gives other bits. `remat::cudnn_batch_norm` runs the same kernel on copies of the statistics and returns them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    "cudnn_batch_norm(Tensor input, Tensor weight, Tensor bias, Tensor? mean, Tensor? variance, bool training, "
    "float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "cudnn_batch_norm_backward(Tensor input, Tensor grad, Tensor weight, Tensor saved_mean, Tensor saved_deviation, "
    "float eps, Tensor notes) -> (Tensor, Tensor, Tensor)"
)


def _cudnn_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *numbers: float,
) -> tuple[torch.Tensor, ...]:
    """The result, what backward needs (mean, inverse deviation, cuDNN's own notes), and the new running statistics."""
    running = [item.clone() if item is not None and training else item for item in (mean, variance)]
    results = torch.ops.aten.cudnn_batch_norm(input, weight, bias, *running, training, *numbers)
    return (*results, *(weight.new_empty(0) if item is None or not training else item for item in running))


def _fake_cudnn_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *_: float,
) -> tuple[torch.Tensor, ...]:
    written = [item if training else None for item in (weight, weight, mean, variance)]
    saved_mean, deviation, *running = (
        weight.new_empty(0) if item is None else torch.empty_like(item) for item in written
    )
    notes = input.new_empty(_notes_bytes(input, training), dtype=torch.uint8)
    return torch.empty_like(input, memory_format=suggest_memory_format(input)), saved_mean, deviation, notes, *running


def _cudnn_batch_norm_backward(
    input: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, *saved: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ops.aten.cudnn_batch_norm_backward(input, grad, weight, None, None, *saved))


def _fake_cudnn_batch_norm_backward(
    input: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    of_input = torch.empty_like(input, memory_format=suggest_memory_format(input))
    return of_input, torch.empty_like(weight), torch.empty_like(weight)


_library.impl("cudnn_batch_norm", _cudnn_batch_norm, "CUDA")
_library.impl("cudnn_batch_norm_backward", _cudnn_batch_norm_backward, "CUDA")
torch.library.register_fake("remat::cudnn_batch_norm", _fake_cudnn_batch_norm, lib=_library)
torch.library.register_fake("remat::cudnn_batch_norm_backward", _fake_cudnn_batch_norm_backward, lib=_library)


def _remember_batch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, weight, _, mean, variance, ctx.training, _, ctx.eps = inputs
    _, *saved, new_mean, new_variance = output
    ctx.mark_non_differentiable(*saved, new_mean, new_variance)
    ctx.save_for_backward(input, weight, *((None, None) if ctx.training else (mean, variance)), *saved)


def _batch_norm_gradients(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    input, weight, mean, variance, *saved, notes = ctx.saved_tensors
    if ctx.training:
        grad = grad.contiguous(memory_format=suggest_memory_format(input))
        found = torch.ops.remat.cudnn_batch_norm_backward(input, grad, weight, *saved, ctx.eps, notes)
    else:
        wanted = [bool(item) for item in ctx.needs_input_grad[:3]]
        found = torch.ops.aten.native_batch_norm_backward(
            grad, input, weight, mean, variance, *saved, False, ctx.eps, wanted
        )
    return (*found, None, None, None, None, None)


torch.library.register_autograd(
    "remat::cudnn_batch_norm", _batch_norm_gradients, setup_context=_remember_batch, lib=_library
)


def eager_cudnn_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *numbers: float,
) -> tuple[torch.Tensor, ...]:
    """`aten.cudnn_batch_norm` as eager computes it, with its writes where tracing sees them."""
    given = (input, weight, bias, mean, variance, training)
    *results, new_mean, new_variance = torch.ops.remat.cudnn_batch_norm(*given, *numbers)
    if training:
        update_statistics((mean, variance), (new_mean, new_variance))
    return tuple(results)


def update_statistics(statistics: Iterable[torch.Tensor | None], new: Iterable[torch.Tensor]) -> None:
    """Write what an op returned for running statistics into those that there are."""
    for item, value in zip(statistics, new, strict=True):
        if item is not None:
            item.copy_(value)


def _notes_bytes(input: torch.Tensor, training: bool) -> int:
    """What cuDNN writes down for its backward."""
    return int(torch._C._get_cudnn_batch_norm_reserve_space_size(input, training)) if training else 0


CUDNN_BATCH_NORM = torch.ops.remat.cudnn_batch_norm.default
