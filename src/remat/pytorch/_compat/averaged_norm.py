"""Batch norm with `momentum=None`, which averages over all batches so far, as an op that tracing can hold.

The layer makes a Python number of its count of batches, which ends Dynamo's graph, in a loop over layers every one of
them. `remat::averaged_batch_norm` takes the count as a tensor, runs eager's kernel on copies of the running statistics
and returns them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.nn.modules.batchnorm import _BatchNorm

from remat.pytorch._compat.cudnn_norm import update_statistics

_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    "averaged_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor variance, Tensor batches, "
    "float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _averaged_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    batches: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """The result, what backward needs (mean, inverse deviation), and the new running statistics; `batches` is how many
    came before.
    """
    running, momentum = (mean.clone(), variance.clone()), 1.0 / float(batches + 1)
    return (*torch.ops.aten.native_batch_norm(input, weight, bias, *running, True, momentum, eps), *running)


def _fake_averaged_batch_norm(
    input: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, variance: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    statistics = (torch.empty_like(item) for item in (mean, variance, mean, variance))
    return torch.empty_like(input, memory_format=suggest_memory_format(input)), *statistics


def _remember_batch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    input, weight, *_, ctx.eps = inputs
    _, *saved, new_mean, new_variance = output
    ctx.mark_non_differentiable(*saved, new_mean, new_variance)
    ctx.save_for_backward(input, weight, *saved)


def _gradients(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    input, weight, *saved = ctx.saved_tensors
    wanted = [bool(item) for item in ctx.needs_input_grad[:3]]
    found = torch.ops.aten.native_batch_norm_backward(grad, input, weight, None, None, *saved, True, ctx.eps, wanted)
    return (*found, None, None, None, None)


_library.impl("averaged_batch_norm", _averaged_batch_norm, "CPU")
torch.library.register_fake("remat::averaged_batch_norm", _fake_averaged_batch_norm, lib=_library)
torch.library.register_autograd("remat::averaged_batch_norm", _gradients, setup_context=_remember_batch, lib=_library)

_torch_forward = _BatchNorm.forward


def averaging_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """`_BatchNorm.forward`, for layers that average by the op above. One object, since Dynamo guards on it."""
    if not _averages(layer, input):
        return _torch_forward(layer, input)
    layer._check_input_dim(input)
    statistics = (layer.running_mean, layer.running_var)
    result, _, _, *new = torch.ops.remat.averaged_batch_norm(
        input, layer.weight, layer.bias, *statistics, layer.num_batches_tracked, layer.eps
    )
    layer.num_batches_tracked.add_(1)
    update_statistics(statistics, new)
    return result


def _averages(layer: Any, input: torch.Tensor) -> bool:
    """Whether eager would run the op's kernel, with a momentum that follows from the count of batches."""
    if layer.momentum is not None or not layer.training or not layer.track_running_stats:
        return False
    if layer.running_mean is None or layer.running_var is None or layer.num_batches_tracked is None:
        return False
    has_deviation = input.dim() > 1 and input.numel() > input.shape[1]
    return input.device.type == "cpu" and has_deviation and layer.eps > 0


@contextlib.contextmanager
def averages_as_ops() -> Iterator[None]:
    """Let layers of torch's own batch norm that average be traced as `remat::averaged_batch_norm`."""
    if _BatchNorm.forward is not _torch_forward:
        # Another thread's step has replaced it too, or somebody else, who will know why.
        yield
        return
    _BatchNorm.forward = averaging_forward
    try:
        yield
    finally:
        _BatchNorm.forward = _torch_forward


AVERAGED_BATCH_NORM = torch.ops.remat.averaged_batch_norm.default
