"""One training step of an example, what it leaves behind, and how two such records differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from remat.zoo import Example

SEED = 1234
Record = Mapping[str, torch.Tensor | None]


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss: the output itself, or what `transformers` calls `loss`."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def cast(dtype: torch.dtype, device: str = "cpu") -> AbstractContextManager[Any]:
    return nullcontext() if dtype is torch.float32 else torch.autocast(device, dtype)


def training_step(model: nn.Module, example: Example, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """Forward, backward with the outputs held, gradients dropped: what `remat.measure` is given."""
    device = next(model.parameters()).device.type

    def step() -> None:
        with cast(dtype, device):
            outputs = model(*example.args, **example.kwargs)
        loss_of(outputs).backward()
        del outputs
        model.zero_grad(set_to_none=True)

    return step


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def restore(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])


def record(
    model: nn.Module, example: Example, buffers: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> Record:
    """Outputs, gradients, buffers and generators after one step from the same seed and buffers."""
    restore(model, buffers)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(SEED)
    with cast(dtype, next(model.parameters()).device.type):
        outputs = model(*example.args, **example.kwargs)
    loss_of(outputs).backward()
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    found: dict[str, torch.Tensor | None] = {f"output {place}": leaf.detach() for place, leaf in enumerate(leaves)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"buffer {name}": buffer for name, buffer in snapshot(model).items()}
    found["CPU generator"] = torch.get_rng_state()
    if torch.cuda.is_available():
        found["CUDA generator"] = torch.cuda.get_rng_state()
    model.zero_grad(set_to_none=True)
    # What a test remembers must not count as memory of the device.
    return {name: None if value is None else value.cpu() for name, value in found.items()}


def differences(expected: Record, found: Record) -> list[str]:
    """What is not the same to the bit."""
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not same_bits(value, found[name])]


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(left.detach().contiguous().view(torch.uint8), right.detach().contiguous().view(torch.uint8))
        if left.dim()
        else left.dtype == right.dtype and left.item() == right.item()
    )


def _close(left: torch.Tensor | None, right: torch.Tensor | None, tolerance: float) -> bool:
    if left is None or right is None:
        return left is right
    if not left.is_floating_point():
        return torch.equal(left, right)
    scale = left.abs().max().item() or 1.0
    return (left.double() - right.double()).abs().max().item() <= tolerance * scale
