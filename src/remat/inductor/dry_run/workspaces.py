"""What kernels of libraries need for themselves while they run, for a dry run's `workspace_of`.

Convolutions choose their algorithm, and with it their workspace, when they run: each distinct one is run once on the
device with tensors of its shapes while its allocations are watched, and so is each sum of a chunked loss's gradients.
Attention's backward follows known rules on CUDA, where products need nothing that grows with them: cuBLAS takes its
workspace once and keeps it. On the CPU every kernel of torch's own is run: one that is given arguments it does not
take says so there, and ends no process.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from remat.inductor.loss import ops as loss_ops  # noqa: F401  defines the op
from remat.pytorch._compat.modes import without_autocast, without_modes
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch._compat.trees import tree_leaves, tree_map
from remat.pytorch.costs.allocations import extra_bytes_of_calls
from remat.pytorch.costs.op_costs import call_key
from remat.pytorch.device import generator_indices, storage_bytes
from remat.pytorch.estimate.cuda_rules import workspace_bytes
from remat.pytorch.graph.nodes import tensors_in
from remat.pytorch.graph.real_results import REFUSALS

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
        op = self._measured_op(name)
        if op is not None:
            key = call_key(name, args, kwargs)
            if key not in self._known:
                self._known[key] = self._measure(op, args, kwargs)
            return self._known[key]
        if name in _KNOWN_ON_CUDA and self._device.type == "cuda":
            return workspace_bytes(_KNOWN_ON_CUDA[name], tuple(args))
        return 0

    def _measured_op(self, name: str) -> Any:
        """What to run to find out, where that is safe."""
        if name in _MEASURED or self._device.type != "cpu":
            return _MEASURED.get(name)
        op = _MEASURED_ON_CPU.get(name) or _op_named(name)
        # A recurrent layer hands its backward blocks whose contents only it knows.
        return None if op is None or "rnn" in name else op

    def _measure(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        generators = generator_indices(self._device)
        with without_modes(), without_autocast(), torch.no_grad(), torch.random.fork_rng(generators):
            real_args, real_kwargs = tree_map(_real, (list(args), dict(kwargs)))
            leaves = tree_leaves((real_args, real_kwargs))
            given = {storage_address(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
            try:
                # The first run of a shape may try several algorithms.
                results = tensors_in(op(*real_args, **real_kwargs))
                made = sum(
                    storage_bytes(tensor, self._device) for tensor in results if storage_address(tensor) not in given
                )
                return max(0, extra_bytes_of_calls(lambda: op(*real_args, **real_kwargs), self._device) - made)
            except REFUSALS as error:
                reason = str(error).split("\n")[0]
                warnings.warn(
                    f"The compiled step's peak is only estimated: {op} could not be run by itself ({reason}).",
                    stacklevel=2,
                )
                return 0


def _op_named(name: str) -> Any:
    """`torch.ops.aten.cumsum.default` for its name; None for what is none of torch's."""
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None) if namespace == "aten" and overload else None
    return getattr(found, overload, None)


def _real(item: Any) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device).zero_()
