"""Do two versions of a step give the same bits? Outputs, gradients, buffers and generators are compared.

Each version runs once from the same state: parameters are shared or equal, buffers and generators are put back
between the runs and afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.errors import RematError
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.costs.plain_peak import loss_like


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether two models computed the same bits in a step, and what did not match."""

    ok: bool
    differences: tuple[str, ...]
    """One sentence for each thing that differs: what it is, and by how much at most."""


def verify(plain: nn.Module, optimized: nn.Module, *args: Any, steps: int = 1, **kwargs: Any) -> Verification:
    """Run both from the same state `steps` times each and compare bit for bit."""
    for model in (plain, optimized):
        if not isinstance(model, nn.Module):
            raise RematError(f"verify compares two modules; it was given a {type(model).__name__}.")
    state = _State.of(plain, optimized)
    expected = [_record(plain, args, kwargs) for _ in range(steps)]
    state.restore()
    found = [_record(optimized, args, kwargs) for _ in range(steps)]
    state.restore()
    differences = [
        difference
        for number, (left, right) in enumerate(zip(expected, found, strict=True))
        for difference in _compare(left, right, f"step {number}: " if steps > 1 else "")
    ]
    return Verification(not differences, tuple(differences))


@dataclass(frozen=True, slots=True)
class _State:
    """Everything a step changes, to be put back."""

    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    gradients: tuple[tuple[nn.Parameter, torch.Tensor | None], ...]
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @staticmethod
    def of(*models: nn.Module) -> _State:
        buffers = {id(buffer): buffer for model in models for buffer in model.buffers()}
        parameters = {id(parameter): parameter for model in models for parameter in model.parameters()}
        return _State(
            tensors=tuple((buffer, buffer.detach().clone()) for buffer in buffers.values()),
            gradients=tuple((parameter, parameter.grad) for parameter in parameters.values()),
            cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else (),
        )

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, value in self.tensors:
                buffer.copy_(value)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


def _record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    outputs = [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    roots = loss_like(outputs)
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    record: dict[str, Any] = {f"output {number}": output.detach().clone() for number, output in enumerate(outputs)}
    for name, parameter in model.named_parameters():
        record[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    record |= {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    record["CPU generator"] = torch.get_rng_state()
    if torch.cuda.is_available():
        record["CUDA generator"] = torch.cuda.get_rng_state()
    return record


def _compare(expected: dict[str, Any], found: dict[str, Any], where: str) -> Iterator[str]:
    for name in sorted({*expected, *found}):
        left, right = expected.get(name), found.get(name)
        if left is None or right is None:
            if left is not right:
                yield f"{where}{name} is {_word(left)} in the plain step and {_word(right)} in the optimized one"
        elif not _same_bits(left, right):
            yield f"{where}{name} differs by up to {_distance(left, right)}"


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point():
        return torch.equal(torch.nan_to_num(left), torch.nan_to_num(right)) and torch.equal(left.isnan(), right.isnan())
    return torch.equal(left, right)


def _distance(left: torch.Tensor, right: torch.Tensor) -> str:
    if left.shape != right.shape:
        return f"shape {tuple(left.shape)} against {tuple(right.shape)}"
    return f"{(left.double() - right.double()).abs().max().item():.3g}"


def _word(value: Any) -> str:
    return "absent" if value is None else "there"
