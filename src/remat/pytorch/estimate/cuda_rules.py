"""CUDA's choices for fake tensors on the CPU: what eager PyTorch would run if the tensors were on a GPU.

A torch without CUDA cannot differentiate fake CUDA tensors, so an estimate for a GPU runs on fake CPU tensors, and the
few composite ops that look at the device are answered here as they would be there: fused attention, dropout with a
mask of bools, fused RMSNorm, and autocast's list of ops that CUDA computes in fp32 and the CPU does not.
Recurrent layers stay as the CPU computes them. Also here: what CUDA's attention kernels need for themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from remat.core.devices import Device
from remat.pytorch._compat.tensors import schema_of
from remat.pytorch._compat.tracing import call_below_autocast, call_below_autograd, decomposes, kernels_replaced
from remat.pytorch._compat.trees import tree_map

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
_LARGEST_FLASH_HEAD = 256
_FLASH_ALIGNMENT = 8
_EFFICIENT_MASK_ALIGNMENT = 16
_FLASH_ROWS, _FLASH_COLUMNS = 128, 32
"""Flash attention's backward pads its sums to these."""

_IN_FP32 = (
    *(aten.acos, aten.asin, aten.cosh, aten.erfinv, aten.exp, aten.expm1, aten.log, aten.log10, aten.log2, aten.log1p),
    *(aten.reciprocal, aten.rsqrt, aten.sinh, aten.tan, aten.softplus, aten.layer_norm, aten.native_layer_norm),
    *(aten.rms_norm, aten.group_norm, aten.cosine_similarity, aten.logsumexp, aten.dist, aten.pdist, aten.renorm),
    *(aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten.upsample_linear1d),
    *(aten.upsample_bilinear2d, aten.upsample_bicubic2d, aten.upsample_trilinear3d, aten.nuclear_norm),
)
_IN_FP32_OVERLOADS = (aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.norm.Scalar)
_SUMS_IN_FP32 = (
    *(aten.softmax.int, aten.log_softmax.int, aten.cumprod.default, aten.cumsum.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.linalg_vector_norm.default),
)
"""They read what they get and compute in fp32 by their own `dtype`."""
_FROM_FP16 = {aten.softmax.int: aten._softmax.default, aten.log_softmax.int: aten._log_softmax.default}
"""Kernels that turn fp16 into fp32 on the way, without a copy."""


@contextmanager
def cuda_rules(device: Device) -> Iterator[None]:
    """While this lasts, CPU tensors of this thread are treated as if they were on `device`."""
    # Flash attention came with the generation that brought bfloat16.
    has_flash = "bf16" in dict(device.flops_per_ns)

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return _attention(has_flash, query, key, value, *args, **kwargs)

    kernels: dict[tuple[Any, str], Callable[..., Any]] = {
        (aten.scaled_dot_product_attention.default, "AutogradCPU"): attention,
        (aten.dropout.default, "AutogradCPU"): _dropout,
        (aten.rms_norm.default, "AutogradCPU"): _rms_norm,
    }
    for op in (*(packet.default for packet in _IN_FP32), *_IN_FP32_OVERLOADS):
        kernels[op, "AutocastCPU"] = _computed_in_fp32(op)
    for op in _SUMS_IN_FP32:
        kernels[op, "AutocastCPU"] = _summed_in_fp32(op)
    home = threading.get_ident()
    with kernels_replaced({place: _only_in(home, place[0], kernel) for place, kernel in kernels.items()}):
        yield


def workspace_bytes(op: Any, args: tuple[Any, ...]) -> int:
    """What a CUDA kernel needs while it runs, where that grows with its input and is known."""
    if op is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward_bytes(*args[1:4])
    if op is aten._scaled_dot_product_efficient_attention_backward.default:
        return int(args[1].numel()) * 4
    return 0


def _flash_backward_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """The sum of the query's gradient and of each row in fp32, and gradients of keys for every query head."""
    batch, heads, length, size = query.shape
    rows = batch * heads * _rounded(length, _FLASH_ROWS)
    sums = rows * (_rounded(size, _FLASH_COLUMNS) + 1) * 4
    shared = heads // key.shape[1]
    return sums + ((key.nbytes + value.nbytes) * shared if shared > 1 else 0)


def _only_in(home: int, op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` in the thread `home`; elsewhere what was there before."""
    composite = decomposes(op)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == home:
            return kernel(*args, **kwargs)
        return op.decompose(*args, **kwargs) if composite else call_below_autocast(op, *args, **kwargs)

    return chosen


def _attention(
    has_flash: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention where it can, memory-efficient where that can, otherwise one op after the other."""
    size = query.shape[-1]
    if query.dim() == 4 and has_flash and mask is None and query.dtype in _HALVES and size <= _LARGEST_FLASH_HEAD:
        inputs = [_padded(item, _FLASH_ALIGNMENT) for item in (query, key, value)]
        scale = size**-0.5 if scale is None else scale
        output = aten._scaled_dot_product_flash_attention(*inputs, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., : value.shape[-1]]
    aligned = 16 // query.dtype.itemsize
    grouped = query.dim() == 4 and key.shape[1] != query.shape[1]
    if query.dim() != 4 or grouped or size % aligned or value.shape[-1] % aligned:
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    bias = None if mask is None else _bias(mask, query, key)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """What the memory-efficient kernel adds to the scores, aligned as it wants it."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = mask.shape[-1]
    mask = _padded(mask, _EFFICIENT_MASK_ALIGNMENT)[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype)
    return torch.native_dropout(input, p, train)[0]


def _rms_norm(
    input: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return aten.rms_norm.default.decompose(input, shape, weight, eps)
    return _FusedRMSNorm.apply(input, shape, weight, eps)


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's RMSNorm keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, input: Any, shape: list[int], weight: Any, eps: float | None) -> Any:
        output, inverse = call_below_autograd(aten._fused_rms_norm.default, input, shape, weight, eps)
        ctx.save_for_backward(input, weight, inverse)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight, inverse = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        found = call_below_autograd(
            aten._fused_rms_norm_backward.default, gradients[0], input, ctx.shape, inverse, weight, wanted
        )
        return found[0], None, found[1], None


def _computed_in_fp32(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call_below_autocast(op, *tree_map(_as_fp32, args), **tree_map(_as_fp32, kwargs))

    return kernel


def _summed_in_fp32(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema_of(op).arguments if not argument.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if args[0].dtype not in _HALVES or given.get("dtype") is not None:
            return call_below_autocast(op, *args, **kwargs)
        if args[0].dtype is torch.float16 and op in _FROM_FP16:
            return call_below_autocast(_FROM_FP16[op], args[0], given["dim"], True)
        rest: Mapping[str, Any] = {name: item for name, item in given.items() if name != names[0]}
        return call_below_autocast(op, args[0], **{**rest, "dtype": torch.float32})

    return kernel


def _as_fp32(item: Any) -> Any:
    return item.float() if isinstance(item, torch.Tensor) and item.dtype in _HALVES else item


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
