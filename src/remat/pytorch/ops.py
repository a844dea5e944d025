"""Ops that eager PyTorch computes in place and that functional tracing would compute differently.

`remat::dropout_noise` is what eager dropout multiplies by on CPU: drawn and scaled in one buffer, in the memory order
of its input. Traced through torch's functional `bernoulli` it would take two more buffers and, for inputs that are
not contiguous, give other bits. It reads nothing, so no schedule has to keep the input for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_library = torch.library.Library("remat", "DEF")
_library.define(
    "dropout_noise(SymInt[] size, SymInt[] stride, float p, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


def _dropout_noise(
    size: Sequence[int], stride: Sequence[int], p: float, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    noise = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return noise.bernoulli_(1 - p).div_(1 - p)


_library.impl("dropout_noise", _dropout_noise, "CompositeExplicitAutograd")


_library.define("custom_backward(str name, Tensor[] inputs, Tensor[] grads) -> Tensor[]")


@torch.library.register_fake("remat::custom_backward", lib=_library)
def _fake_custom_backward(name: str, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(item) for item in inputs if item.is_floating_point()]


def define_custom_backward(run: Callable[..., list[torch.Tensor]]) -> None:
    """How `remat::custom_backward`, the backward of a custom op that reads data, runs on real tensors."""
    _library.impl("custom_backward", run, "CompositeExplicitAutograd")


def eager_dropout(input: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """`aten.dropout` as eager PyTorch computes it, step by step."""
    if p == 0 or not train or input.numel() == 0:
        return input
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    if input.device.type != "cpu":
        return torch.native_dropout(input, p, train)[0]
    stride = torch.empty_like(input).stride()
    noise = torch.ops.remat.dropout_noise(input.shape, stride, p, dtype=input.dtype, device=input.device)
    return input * noise
