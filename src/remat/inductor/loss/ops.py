"""Two ops of the chunked loss that the compiler leaves alone.

`remat::add_linear_grads` adds a chunk's share to the gradients of a linear layer, in place. The sum over chunks of the
weight's gradient stays in float32 inside the matrix product, which Inductor cannot express and which saves a pass over
the weights. It claims to change `mask`, which the next chunk reads, so that no two chunks are computed at the same
time. And it claims to change `total`, from which the loss is made, so that every partitioner runs it in the forward.

`remat::stored` is a copy in another type that exists once. A cast in plain ops would be fused into each of its readers,
and readers that are library kernels would get a copy each.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    "add_linear_grads(Tensor(a!)? hidden_grad, Tensor(b!)? weight_grad, Tensor(c!)? bias_grad, Tensor(d!) mask,"
    " Tensor(e!) total, Tensor logits_grad, Tensor hidden, Tensor weight, SymInt start) -> ()"
)
_library.define("stored(Tensor source, ScalarType dtype, SymInt rows) -> Tensor")

_BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 8192


def _add_linear_grads(
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    mask: Tensor,
    total: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    start: int,
) -> None:
    """The first chunk (`start` 0) overwrites the sums, which come in without contents."""
    rows = slice(start, start + logits_grad.shape[0])
    if hidden_grad is not None:
        _add_product(hidden_grad[rows], logits_grad, weight, fresh=True)
    if weight_grad is not None:
        _add_product(weight_grad, logits_grad.t(), hidden[rows], fresh=start == 0)
    if bias_grad is not None:
        column_sums = logits_grad.sum(0, dtype=bias_grad.dtype)
        if start == 0:
            bias_grad.copy_(column_sums)
        else:
            bias_grad.add_(column_sums)


_library.impl("add_linear_grads", _add_linear_grads, "CompositeExplicitAutograd")


@torch.library.register_fake("remat::add_linear_grads", lib=_library)
def _fake_add_linear_grads(*args: Tensor | int | None) -> None:
    return None


def _stored(source: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """`source` as `dtype`, with rows of zeros at the end up to `rows`."""
    result = torch.empty((rows, *source.shape[1:]), dtype=dtype, device=source.device)
    result[: source.shape[0]].copy_(source)
    result[source.shape[0] :].zero_()
    return result


_library.impl("stored", _stored, "CompositeExplicitAutograd")


@torch.library.register_fake("remat::stored", lib=_library)
def _fake_stored(source: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    return torch.empty((rows, *source.shape[1:]), dtype=dtype, device=source.device)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, fresh: bool) -> None:
    """`total += left @ right`, or `=` where fresh; into float32, half-precision products are not rounded before."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if fresh else 1, out=total)
    elif left.device.type not in ("cuda", "xpu"):
        _add_wide_product(total, left, right, fresh)
    elif fresh:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif _adds_into_float(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        for part, some in zip(*(tensor.split(_BLOCK_ROWS) for tensor in (total, left)), strict=True):
            part.add_(torch.mm(some, right, out_dtype=total.dtype))


def _add_wide_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """Where no kernel multiplies half precision into float32: with a few rows or inner numbers in float32 at a time."""
    beta = 0 if fresh else 1
    rows, inner = left.shape
    if rows > inner:
        wide = right.to(total.dtype)
        step = max(1, _BLOCK_BYTES // (total.itemsize * inner))
        for part, some in zip(total.split(step), left.split(step), strict=True):
            torch.addmm(part, some.to(total.dtype), wide, beta=beta, out=part)
        return
    step = max(1, _BLOCK_BYTES // (total.itemsize * (rows + right.shape[1])))
    for some, others in zip(left.split(step, dim=1), right.split(step), strict=True):
        torch.addmm(total, some.to(total.dtype), others.to(total.dtype), beta=beta, out=total)
        beta = 1


@functools.cache
def _adds_into_float(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix in one kernel; some versions refuse."""
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
