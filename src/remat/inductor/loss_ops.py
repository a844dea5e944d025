"""Two ops of the chunked loss that the compiler leaves alone.

`remat::add_linear_grads` adds a chunk's share to the gradients of a linear layer, in place. The sum over chunks of the
weight's gradient stays in float32 inside the matrix product, which Inductor cannot express and which saves a pass over
the weights. It claims to change `scales`, which the next chunk reads, so that no two chunks are computed at the same
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
    "add_linear_grads(Tensor(a!)? hidden_grad, Tensor(b!)? weight_grad, Tensor(c!)? bias_grad, Tensor(d!) scales,"
    " Tensor(e!) total, Tensor logits_grad, Tensor hidden, Tensor weight, SymInt start) -> ()"
)
_library.define("stored(Tensor source, ScalarType dtype, SymInt rows) -> Tensor")

_HALF = (torch.bfloat16, torch.float16)
_BLOCK_BYTES = 32 << 20


def _add_linear_grads(
    hidden_grad: Tensor | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    scales: Tensor,
    total: Tensor,
    logits_grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    start: int,
) -> None:
    """The first chunk (`start` 0) overwrites the sums, which come in without contents."""
    rows = slice(start, start + logits_grad.shape[0])
    if hidden_grad is not None:
        torch.mm(logits_grad, weight, out=hidden_grad[rows])
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
    """`total += left @ right`, or `=` where fresh; products of half-precision numbers are never rounded in between."""
    beta = 0 if fresh else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif left.device.type != "cpu" and _adds_into_float(left.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        _add_product_in_blocks(total, left, right, fresh)


def _add_product_in_blocks(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """The same where no single kernel does it, with little memory at a time."""
    step = max(1, _BLOCK_BYTES // (4 * max(left.shape[1], right.shape[1])))
    on_cpu = left.device.type == "cpu"
    wide = right.to(total.dtype) if on_cpu else right
    for start in range(0, total.shape[0], step):
        part, some = total[start : start + step], left[start : start + step]
        if on_cpu:
            torch.addmm(part, some.to(total.dtype), wide, beta=0 if fresh else 1, out=part)
        elif fresh:
            torch.mm(some, right, out_dtype=total.dtype, out=part)
        else:
            part.add_(torch.mm(some, right, out_dtype=total.dtype))


@functools.cache
def _adds_into_float(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half-precision product to a float32 matrix in one kernel; some versions refuse."""
    if dtype not in _HALF:
        return False
    total = torch.ones(16, 16, device=device)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
