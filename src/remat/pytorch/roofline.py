"""What an op should take when it cannot be run: the larger of arithmetic and memory traffic, plus a launch.

FLOPs come from `torch.utils.flop_counter`, bytes from the shapes of inputs and outputs. Rates are those of a class
of device, good for ordering ops by cost, not for predicting a step to the per cent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from remat.pytorch.capture import tensors_in


@dataclass(frozen=True, slots=True)
class Rates:
    flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float


RATES: Mapping[str, Rates] = MappingProxyType(
    {
        "cpu": Rates(flops_per_ns=50, bytes_per_ns=10, launch_ns=2_000),
        "cuda": Rates(flops_per_ns=100_000, bytes_per_ns=2_000, launch_ns=4_000),
    }
)


def roofline_ns(node: Node, device: torch.device) -> float:
    """An estimate of the op's time from its fake inputs and outputs alone."""
    rates = RATES.get(device.type, RATES["cuda"])
    traffic = sum(
        tensor.numel() * tensor.element_size()
        for item in [node, *node.all_input_nodes]
        for tensor in tensors_in(item.meta.get("val"))
    )
    return max(_flops(node) / rates.flops_per_ns, traffic / rates.bytes_per_ns) + rates.launch_ns


def _flops(node: Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0.0

    def value(item: Any) -> Any:
        return item.meta.get("val") if isinstance(item, Node) else item

    args = torch.fx.node.map_arg(node.args, value)
    kwargs = torch.fx.node.map_arg(node.kwargs, value)
    return float(count(*args, **kwargs, out_val=node.meta.get("val")))
