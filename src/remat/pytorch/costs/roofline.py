"""What an op should take when it is not run: the larger of arithmetic and memory traffic, plus a launch.

FLOPs come from `torch.utils.flop_counter`, bytes from the shapes of inputs and outputs. Without a device of the
catalogue the rates are those of a class of device, good for ordering ops by cost; with one they are its data sheet's
peaks times what kernels usually reach of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from remat.core.devices import Device, DeviceKind
from remat.pytorch._compat.symbols import as_called
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.graph.nodes import tensors_in

COMPUTE_SHARE = 0.6
"""Of the peak rate, what large matrix products reach."""
ATTENTION_SHARE = 0.4
CONVOLUTION_SHARE = 0.3
"""Convolutions of images in PyTorch's default layout, which are turned around first."""
BANDWIDTH_SHARE = 0.7
"""Of the peak bandwidth, what kernels that only move data reach."""
LAUNCH_NS: Mapping[DeviceKind, float] = MappingProxyType({DeviceKind.CPU: 2_000.0, DeviceKind.CUDA: 4_000.0})

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_CONVOLUTIONS = frozenset({torch.ops.aten.convolution, torch.ops.aten.convolution_backward})
_LOOKUPS = frozenset(
    {torch.ops.aten.embedding, torch.ops.aten.index_select, torch.ops.aten.gather, torch.ops.aten.index}
)
"""They read as much of their table as they return."""


@dataclass(frozen=True, slots=True)
class PeakRates:
    flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float

    def time_ns(self, flops: float, traffic_bytes: float) -> float:
        return max(flops / self.flops_per_ns, traffic_bytes / self.bytes_per_ns) + self.launch_ns


RATES: Mapping[str, PeakRates] = MappingProxyType(
    {
        "cpu": PeakRates(flops_per_ns=50, bytes_per_ns=10, launch_ns=LAUNCH_NS[DeviceKind.CPU]),
        "cuda": PeakRates(flops_per_ns=100_000, bytes_per_ns=2_000, launch_ns=LAUNCH_NS[DeviceKind.CUDA]),
    }
)


def roofline_ns(node: Node, device: torch.device) -> float:
    """An estimate of the op's time from its fake inputs and outputs alone, at the sizes of the call that was traced."""
    rates = RATES.get(device.type, RATES["cuda"])

    def value(item: Any) -> Any:
        return as_called(item.meta.get("val")) if isinstance(item, Node) else item

    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    traffic = _bytes_of(tensor for item in (node, *node.all_input_nodes) for tensor in tensors_in(value(item)))
    return rates.time_ns(_flops(node.target, args, kwargs, value(node)), traffic)


def usual_call_ns(device_type: str, op: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The same for a call, on a usual device of that type."""
    rates = RATES.get(device_type, RATES["cuda"])
    traffic = _bytes_of((*_tensors((args, kwargs)), *_tensors(result)))
    return rates.time_ns(_flops(op, args, kwargs, result), traffic)


def call_ns(device: Device, op: Any, args: Any, kwargs: Any, result: Any) -> float:
    """The same for a call and a device of the catalogue."""
    inputs, outputs = _tensors((args, kwargs)), _tensors(result)
    packet = getattr(op, "overloadpacket", None)
    rates = PeakRates(
        flops_per_ns=device.rate(_dtype_of(packet, inputs)) * _compute_share(packet),
        bytes_per_ns=device.bytes_per_ns * BANDWIDTH_SHARE,
        launch_ns=LAUNCH_NS[device.kind],
    )
    read = outputs if packet in _LOOKUPS else inputs
    return rates.time_ns(_flops(op, args, kwargs, result), _bytes_of(read) + _bytes_of(outputs))


def _compute_share(packet: Any) -> float:
    if packet in _CONVOLUTIONS:
        return CONVOLUTION_SHARE
    return ATTENTION_SHARE if "scaled_dot_product" in str(packet) else COMPUTE_SHARE


def _dtype_of(packet: Any, inputs: Iterable[torch.Tensor]) -> str:
    """In which units the op is computed; PyTorch lets convolutions use TF32, and products where the user allows it."""
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)
    if dtype is torch.float32:
        convolution = packet in _CONVOLUTIONS and torch.backends.cudnn.allow_tf32
        return "tf32" if convolution or torch.get_float32_matmul_precision() != "highest" else "fp32"
    return "fp8" if dtype.itemsize == 1 else _DTYPES.get(dtype, "fp32")


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    # An expanded tensor is one row, seen many times.
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _flops(target: Any, args: Any, kwargs: Any, result: Any) -> float:
    count = flop_registry.get(getattr(target, "overloadpacket", None))
    try:
        return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))
    except AssertionError:
        # torch 2.11 does not count attention with fewer key heads than query heads.
        return 0.0
