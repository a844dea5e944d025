"""What kernels of libraries need for themselves while they run, for a dry run's `workspace_of`.

Convolutions choose their algorithm, and with it their workspace, when they run: each distinct one is run once on the
device with tensors of its shapes while its allocations are watched, and so is each sum of a chunked loss's gradients.
Attention's backward follows known rules on CUDA, where products need nothing that grows with them: cuBLAS takes its
workspace once and keeps it. On the CPU products of half precision may copy what they read, so they are run as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from remat.inductor.loss import ops as loss_ops  # noqa: F401  defines the op
from remat.pytorch._compat.modes import without_modes
from remat.pytorch._compat.trees import tree_map
from remat.pytorch.costs.allocations import extra_bytes_of_calls
from remat.pytorch.costs.op_costs import call_key
from remat.pytorch.device import storage_bytes
from remat.pytorch.estimate.cuda_rules import workspace_bytes
from remat.pytorch.graph.nodes import tensors_in

_MEASURED: Mapping[str, Any] = {
    str(op): op
    for op in (
        torch.ops.aten.convolution.default,
        torch.ops.aten.convolution_backward.default,
        torch.ops.remat.add_linear_grads.default,
    )
}
_MEASURED_ON_CPU: Mapping[str, Any] = {
    f"extern_kernels.{name}": getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm")
}
_KNOWN_ON_CUDA: Mapping[str, Any] = {
    str(op): op
    for op in (
        torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
    )
}


class Workspaces:
    """Call it with a call's name and arguments; what was measured once is remembered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, int] = {}

    @property
    def tuning_bytes(self) -> int:
        """What Inductor writes to between two runs of a kernel that it times: as much as the device's cache holds."""
        is_cuda = self._device.type == "cuda"
        return int(torch.cuda.get_device_properties(self._device).L2_cache_size) if is_cuda else 0

    def __call__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        measured = {**_MEASURED, **_MEASURED_ON_CPU} if self._device.type == "cpu" else _MEASURED
        if name in measured:
            key = call_key(name, args, kwargs)
            if key not in self._known:
                self._known[key] = self._measure(measured[name], args, kwargs)
            return self._known[key]
        if name in _KNOWN_ON_CUDA and self._device.type == "cuda":
            return workspace_bytes(_KNOWN_ON_CUDA[name], tuple(args))
        return 0

    def _measure(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        with without_modes(), torch.no_grad():
            real_args, real_kwargs = tree_map(_real, (list(args), dict(kwargs)))
            # The first run of a shape may try several algorithms.
            results = tensors_in(op(*real_args, **real_kwargs))
            made = sum(storage_bytes(tensor, self._device) for tensor in results if "out" not in kwargs)
            return max(0, extra_bytes_of_calls(lambda: op(*real_args, **real_kwargs), self._device) - made)


def _real(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device).zero_()
