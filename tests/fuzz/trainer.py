"""A case being trained: steps in, records out of what each step leaves behind, bit by bit.

The same trainer runs the plain module and the optimized one; only `optimize` differs. Gradients, parameters, buffers,
outputs, inputs and generators are copied after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tests.fuzz.modules import Backward, Case, Chain, Form, Update
from torch import nn
from torch.utils._pytree import tree_leaves

Record = Mapping[str, torch.Tensor | None]
Batches = list[tuple[torch.Tensor, torch.Tensor]]
Watch = Callable[["Trainer", Batches], Any]
"""Runs a part of a step, `trainer.run(batches)`, and returns what that returns."""


def unwatched(trainer: Trainer, batches: Batches) -> Any:
    return trainer.run(batches)


class Trainer:
    """Holds a module built from a case, its optimizer and what is called in each step."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.device = case, device
        self.module = case.build().to(device)
        self.call: Any = _callable_of(self.module, case)
        self.optimizer = _optimizer(self.module, case)

    def optimize(self, change: Callable[[Any], Any]) -> None:
        """Train what `change` makes of the module or function from now on."""
        self.call = change(self.call)

    def reset(self) -> None:
        """Back to the state in which the module was built."""
        # Built again and not remembered: a copy of the parameters would count as memory that the step can reach.
        start = self.case.build()
        with torch.no_grad():
            for old, new in zip(_state(self.module), _state(start), strict=True):
                old[1].copy_(new[1])
        for parameter in self.module.parameters():
            parameter.grad = None
        self.optimizer.state.clear()

    def seed(self) -> None:
        """Set the generators to where a run of this case begins."""
        torch.manual_seed(self.case.seed + 7)

    def step(self, number: int, watch: Watch = unwatched) -> Record:
        """Forward, backward and update; each micro-batch is watched by itself."""
        found: dict[str, torch.Tensor | None] = {}
        is_step = self.case.form is Form.STEP
        for micro in range(self.case.micro_batches):
            batches = self._batches(number * self.case.micro_batches + micro)
            # A step that goes back by itself knows nothing of what the caller holds for the next one.
            for call, together in enumerate([[batch] for batch in batches] if is_step else [batches]):
                kept = watch(self, together)
                self._take_gradients(kept.get("gradients"))
                found |= {f"micro-batch {micro}.{call}: {name}": value for name, value in _named(kept, together)}
                del kept
            del batches, together
        for name, parameter in self.module.named_parameters():
            found[f"gradient of {name}"] = _copy(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.case.drops_gradients)
        found |= {f"after the step: {name}": _copy(tensor) for name, tensor in _state(self.module)}
        found["CPU generator"] = torch.get_rng_state()
        if self.device == "cuda":
            found["CUDA generator"] = torch.cuda.get_rng_state()
        return found

    def _take_gradients(self, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """What `torch.autograd.grad` returned becomes what the optimizer reads."""
        for parameter, gradient in zip(_trained(self.module), gradients or (), strict=False):
            parameter.grad = gradient

    def _batches(self, number: int) -> Batches:
        count = 2 if self.case.backward is Backward.TWO_CALLS else 1
        return [self._batch(number * count + call) for call in range(count)]

    def _batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = self.case.inputs(number)
        if self.device == "cpu":
            return x, target
        moved = x.detach().to(self.device).requires_grad_(x.requires_grad)
        return moved, target.to(self.device)

    def run(self, batches: Batches) -> dict[str, Any]:
        """What a training loop does for one micro-batch; returns what the caller still holds."""
        case = self.case
        with _cast(case, self.device):
            results = [self.call(*batch) for batch in batches]
        if case.form is Form.STEP:
            return {"results": results}
        with _cast(case, self.device):
            losses = [
                _loss(case, self.module, result, batch[1]) for result, batch in zip(results, batches, strict=True)
            ]
        others = [leaf for result in results for leaf in tree_leaves(result)[1:] if leaf.requires_grad]
        return {"results": results, "losses": losses, **_go_back(case, self.module, losses, others)}

    def present_bytes(self, batches: Batches) -> int:
        """Bytes of the distinct storages that a step starts with."""
        tensors = [*(tensor for _, tensor in _state(self.module)), *tree_leaves(batches)]
        tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        tensors += [leaf for leaf in tree_leaves(list(self.optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
        dense = [part for tensor in tensors for part in _dense(tensor) if part.device.type == self.device]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in dense}
        return sum(storages.values())


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _dense(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]


def _callable_of(module: Chain, case: Case) -> Any:
    if case.form is Form.MODULE:
        return module

    def loss_of(x: torch.Tensor, target: torch.Tensor) -> Any:
        return _loss(case, module, module(x, target), target)

    def step(x: torch.Tensor, target: torch.Tensor) -> Any:
        loss = _loss(case, module, module(x, target), target)
        loss.backward()
        return loss.detach()

    return loss_of if case.form is Form.FUNCTION else step


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _optimizer(module: nn.Module, case: Case) -> torch.optim.Optimizer:
    parameters = _trained(module)
    if case.update is Update.ADAMW:
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if case.update is Update.MOMENTUM else 0.0)


def _cast(case: Case, device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, torch.bfloat16) if case.autocast else nullcontext()


def _first(result: Any) -> torch.Tensor:
    return tree_leaves(result)[0]


def _loss(case: Case, module: Chain, result: Any, target: torch.Tensor) -> torch.Tensor:
    """The number to be minimized, from what the module or function returned."""
    first = _first(result)
    return first if case.loss_inside or not first.dim() else module.loss(first.float(), target)


def _go_back(case: Case, module: nn.Module, losses: list[torch.Tensor], others: list[torch.Tensor]) -> dict[str, Any]:
    """Call for gradients as the case says; `others` are returned beside the loss and could have some."""
    loss = losses[0]
    if case.backward is Backward.RETAINED:
        loss.backward(retain_graph=True)
        loss.backward()
    elif case.backward is Backward.TWO_LOSSES:
        loss.backward(retain_graph=True)
        _second(loss, others).backward()
    elif case.backward is Backward.TOGETHER:
        second = _second(loss, others)
        torch.autograd.backward([loss, second], [torch.ones_like(loss), torch.full_like(second, 0.5)])
    elif case.backward is Backward.FUNCTIONAL:
        return {"gradients": torch.autograd.grad(loss, _trained(module), allow_unused=True)}
    else:
        sum(losses[1:], loss).backward()
    return {}


def _second(loss: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return others[0].float().mean() if others else loss * 0.5


def _named(kept: dict[str, Any], batches: Batches) -> Iterator[tuple[str, Any]]:
    for number, leaf in enumerate(tree_leaves(kept)):
        yield f"output {number}", _copy(leaf)
    for number, (x, _) in enumerate(batches):
        yield f"input {number}", _copy(x)
        if x.requires_grad:
            yield f"gradient of input {number}", _copy(x.grad)


def _copy(value: Any) -> Any:
    """A copy on the CPU, in the same strides' order, of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.coalesce().to_dense() if value.is_sparse else value).cpu().clone()


def same_bits(left: Any, right: Any) -> bool:
    """Whether two recorded values are equal to the bit, any NaN like any other."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right) and not (left.is_floating_point() and bool((left == 0).any())):
        return True
    if not left.is_floating_point():
        return torch.equal(left, right)
    equal = (
        left.reshape(-1).contiguous().view(torch.uint8) == right.reshape(-1).contiguous().view(torch.uint8)
        if left.dim()
        else None
    )
    if equal is None:
        return same_bits(left.reshape(1), right.reshape(1))
    same = equal.view(*left.shape[:-1], left.shape[-1], left.element_size()).all(-1)
    return bool((same | (left.isnan() & right.isnan())).all())


def differences(expected: Record, found: Record) -> list[str]:
    """What is not the same, with how far apart it is at most."""
    names = list(dict.fromkeys([*expected, *found]))
    return [
        f"{name} ({_distance(expected.get(name), found.get(name))})"
        for name in names
        if not same_bits(expected.get(name), found.get(name))
    ]


CANCELLED = 1e-2
"""What is left of the largest gradient where terms as large as it cancel."""


def far_apart(expected: Record, found: Record, tolerance: float) -> list[str]:
    """What differs by more than `tolerance` of the largest element, generators left out.

    A gradient whose terms cancel is compared with the largest one of the step.
    """
    gradients = [item for name, item in expected.items() if name.startswith("gradient of ") and item is not None]
    usual = max((_largest(item) for item in gradients), default=0.0)
    names = [name for name in dict.fromkeys([*expected, *found]) if "generator" not in name]
    return [
        f"{name} ({_distance(expected.get(name), found.get(name))})"
        for name in names
        if not _close(expected.get(name), found.get(name), tolerance, CANCELLED * usual)
    ]


def _close(left: Any, right: Any, tolerance: float, least_scale: float) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor) or left.shape != right.shape:
        return type(left) is type(right) and not isinstance(left, torch.Tensor)
    if not left.is_floating_point() or not left.numel():
        return left.dtype == right.dtype and torch.equal(left, right)
    # A bias before a norm has a gradient of nothing but rounding.
    scale = max(_largest(left), 2e-2, least_scale)
    return torch.allclose(left.double(), right.double(), rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _largest(tensor: torch.Tensor) -> float:
    values = tensor.to_dense() if tensor.is_sparse else tensor
    return values.double().nan_to_num().abs().max().item() if values.numel() else 0.0


def _distance(left: Any, right: Any) -> str:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return f"{_word(left)} and {_word(right)}"
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}"
    if not left.numel():
        return "empty"
    return f"{(left.double() - right.double()).abs().max().item():.3g} apart"


def _word(value: Any) -> str:
    return "absent" if value is None else "there" if isinstance(value, torch.Tensor) else str(value)
