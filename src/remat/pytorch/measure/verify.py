"""Do two versions of a step give the same bits? Outputs, gradients, buffers and generators are compared.

Each version runs once from the same state: parameters are shared or equal, and whatever a step changes is put back
between the runs and afterwards. A function may also update parameters; these are compared, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.errors import RematError
from remat.pytorch.measure.subject import Subject, model_of, subject_of
from remat.pytorch.reach import reachable_from, reachable_modules, reachable_optimizers


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether two models computed the same bits in a step, and what did not match."""

    ok: bool
    differences: tuple[str, ...]
    """One sentence for each thing that differs: what it is, and by how much at most."""


def verify(plain: Any, optimized: Any, *args: Any, steps: int = 1, **kwargs: Any) -> Verification:
    """Run both from the same state `steps` times each and compare bit for bit.

    `plain` is a module with its arguments, a step function, a Lightning module with a batch, or a Trainer of
    transformers, which brings its own; `optimized` is the same after `remat.optimize`, or a Trainer's optimized model.
    """
    subject, other = subject_of(plain, args, kwargs), model_of(optimized)
    if isinstance(subject.step, nn.Module) != isinstance(other, nn.Module):
        names = " and a ".join(type(step).__name__ for step in (plain, optimized))
        raise RematError(f"verify compares two modules or two functions; it was given a {names}.")
    return verify_subject(subject, other, steps=steps)


def verify_subject(subject: Subject, optimized: Any, *, steps: int = 1) -> Verification:
    """Whether a subject's step and the one that takes its place give the same bits."""
    state = StepState.of(subject, optimized)
    expected = [_record(subject, subject.step) for _ in range(steps)]
    state.restore()
    found = [_record(subject, optimized) for _ in range(steps)]
    state.restore()
    differences = [
        difference
        for number, (left, right) in enumerate(zip(expected, found, strict=True))
        for difference in _compare(left, right, f"step {number}: " if steps > 1 else "")
    ]
    return Verification(not differences, tuple(differences))


@dataclass(frozen=True, slots=True)
class StepState:
    """Everything a step changes, to be put back."""

    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    gradients: tuple[tuple[nn.Parameter, torch.Tensor | None], ...]
    optimizers: tuple[tuple[torch.optim.Optimizer, dict[str, Any]], ...]
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @staticmethod
    def of(subject: Subject, *others: Any) -> StepState:
        steps = (subject.step, *others)
        modules = [module for step in steps for module in _modules_of(step)]
        changed = [buffer for module in modules for buffer in module.buffers()]
        parameters = {id(item): item for module in modules for item in module.parameters()}
        optimizers = [] if isinstance(subject.step, nn.Module) else reachable_optimizers(subject.step)
        if not isinstance(subject.step, nn.Module):
            reached = reachable_from(subject.step, subject.inputs).tensors
            # It may add to the gradients that are there; a module's are dropped before it runs.
            changed += [tensor for name in ("parameters", "gradients", "inputs") for tensor in reached[name].values()]
        return StepState(
            tensors=tuple((item, item.detach().clone()) for item in {id(item): item for item in changed}.values()),
            gradients=tuple((parameter, parameter.grad) for parameter in parameters.values()),
            optimizers=tuple((optimizer, copy.deepcopy(optimizer.state_dict())) for optimizer in optimizers),
            cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else (),
        )

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for optimizer, state in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))


def _modules_of(step: Any) -> list[nn.Module]:
    return [step] if isinstance(step, nn.Module) else reachable_modules(step)


def _record(subject: Subject, step: Any) -> dict[str, Any]:
    if isinstance(step, nn.Module):
        step.zero_grad(set_to_none=True)
    outputs = subject.run(step)
    record: dict[str, Any] = {f"output {number}": output.detach().clone() for number, output in enumerate(outputs)}
    modules = [step] if isinstance(step, nn.Module) else _modules_of(subject.step)
    for number, module in enumerate(modules):
        record |= _contents(module, f" of module {number}" if len(modules) > 1 else "", with_values=step is not module)
    record["CPU generator"] = torch.get_rng_state()
    if torch.cuda.is_available():
        record["CUDA generator"] = torch.cuda.get_rng_state()
    return record


def _contents(module: nn.Module, whose: str, *, with_values: bool) -> dict[str, Any]:
    parameters = dict(module.named_parameters())
    found: dict[str, Any] = {
        f"gradient of {name}{whose}": None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in parameters.items()
    }
    if with_values:
        found |= {f"parameter {name}{whose}": parameter.detach().clone() for name, parameter in parameters.items()}
    return found | {f"buffer {name}{whose}": buffer.detach().clone() for name, buffer in module.named_buffers()}


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
