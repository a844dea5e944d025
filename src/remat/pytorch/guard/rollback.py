"""The state that a training step changes, as it was before the step.

In: a step, looked at once for its modules, optimizers and scalers, and the arguments of each call. Out: a `Before`,
which puts generators, buffers, gradients and scalers back, or says in a sentence why that cannot be done. Only buffers
that steps were seen to write are copied; versions tell of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from remat.pytorch._compat.modes import without_modes
from remat.pytorch._compat.scalers import scaler_restorer
from remat.pytorch._compat.tensors import version_of
from remat.pytorch.generators import Generators
from remat.pytorch.guard.gradients import Accumulations, Gradients
from remat.pytorch.guard.memory_errors import is_out_of_memory, let_go_of
from remat.pytorch.reach import (
    reachable_leaves,
    reachable_modules,
    reachable_optimizers,
    reachable_scalers,
    tensors_within,
)

Place = tuple[int, str]
"""A buffer: its module's identity and its name there."""
STEPPED = (
    "The step ran out of memory and cannot be run again, because an optimizer had begun to change the parameters; "
    "guard forward and backward alone, and call the optimizer after them."
)
GRADIENTS_CHANGED = (
    "The step ran out of memory and cannot be run again, because it had changed gradients in place that were there "
    "before it; drop them with zero_grad(set_to_none=True), or leave clipping to after the guarded step."
)
BUFFER_CHANGED = (
    "The step ran out of memory and cannot be run again, because it had written to a buffer that no step before it "
    "wrote to; run the same batch again."
)


class StepFacts:
    """What a step can reach, found once, and what its runs have been seen to write."""

    def __init__(self, step: Any) -> None:
        modules = {id(item): item for root in reachable_modules(step) for item in root.modules()}
        self._modules = list(modules.values())
        optimizers = reachable_optimizers(step)
        given = (item for optimizer in optimizers for group in optimizer.param_groups for item in group["params"])
        members = (item for module in self._modules for item in module.parameters(recurse=False))
        found = (*members, *given, *reachable_leaves(step))
        self._parameters = list({id(item): item for item in found}.values())
        self._buffers = [(module, name) for module in self._modules for name, _ in module.named_buffers(recurse=False)]
        self._scalers = reachable_scalers(step)
        with without_modes():
            self.anchor = torch.empty(0, requires_grad=True)
        """What results hang on that have no other input with a gradient."""
        self._counters: dict[int, Accumulations] = {}
        self._written: set[Place] | None = None
        """Buffers by module and name; None until a step has run, when all of them may be."""

    def modules(self) -> Sequence[nn.Module]:
        return self._modules

    def before(self, args: Sequence[Any], kwargs: dict[str, Any], *, is_backward: bool = False) -> Before:
        """What a step that begins now may change; a backward alone writes no buffers."""
        parameters = self._with_inputs(args, kwargs)
        try:
            return Before(self, parameters, is_backward=is_backward)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            let_go_of(error)
        # Copies of buffers are small: what was freed since gives room for them.
        return Before(self, parameters, is_backward=is_backward)

    def _with_inputs(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        inputs = [item for item in tensors_within((args, kwargs)) if item.requires_grad and item.is_leaf]
        return [*self._parameters, *inputs]

    def buffers(self) -> Buffers:
        return Buffers(self._buffers, self._written)

    def needs_gradients(self) -> bool:
        return any(item.requires_grad for item in self._parameters)

    def versions(self) -> list[int]:
        """How often each parameter was written to."""
        return [version_of(item) for item in self._parameters]

    def gradients(self, parameters: Sequence[torch.Tensor]) -> Gradients:
        return Gradients([item for item in parameters if item.requires_grad], self._counters)

    def scalers(self) -> list[Callable[[], None]]:
        return [scaler_restorer(scaler) for scaler in self._scalers]

    def wrote(self, buffers: Buffers) -> None:
        """A step has ended; after the first one, contents are compared with what they were."""
        if self._written is None:
            with without_modes():
                self._written = buffers.written(by_value=True)
        else:
            self._written |= buffers.written()


class Buffers:
    """Buffers before a step: references and versions of all, copies of those that steps write."""

    def __init__(self, places: Sequence[tuple[nn.Module, str]], copied: set[Place] | None) -> None:
        found = ((module, name, getattr(module, name, None)) for module, name in places)
        self._all = [
            (module, name, buffer, version_of(buffer))
            for module, name, buffer in found
            if buffer is not None and not buffer.is_inference()
        ]
        with torch.no_grad():
            self._copies = {
                (id(module), name): buffer.clone()
                for module, name, buffer, _ in self._all
                if copied is None or (id(module), name) in copied or _is_statistic(module, name)
            }

    def written(self, *, by_value: bool = False) -> set[Place]:
        """Those that were written in place since, as their versions tell, or also their contents."""
        return {
            (id(module), name)
            for module, name, buffer, version in self._all
            if version_of(buffer) != version or (by_value and self._differs(module, name, buffer))
        }

    def _differs(self, module: nn.Module, name: str, buffer: torch.Tensor) -> bool:
        copied = self._copies.get((id(module), name))
        return copied is not None and not torch.equal(buffer, copied)

    def are_there(self) -> bool:
        return bool(self._all)

    def are_known(self) -> bool:
        return self.written() <= self._copies.keys()

    def restore(self) -> None:
        for module, name, buffer, _ in self._all:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            copied = self._copies.get((id(module), name))
            if copied is not None:
                with torch.no_grad():
                    # Without counting up its version: a graph that has just been made may have saved it.
                    buffer.data.copy_(copied)


def _is_statistic(module: nn.Module, name: str) -> bool:
    """Batch normalization writes these without counting a version up."""
    return module.training and name.startswith("running_")


class Before:
    """Everything that one run of a step may change, at its beginning."""

    def __init__(self, facts: StepFacts, parameters: Sequence[torch.Tensor], *, is_backward: bool = False) -> None:
        self._facts, self.parameters = facts, parameters
        self._versions = [version_of(item) for item in parameters]
        self._scalers = facts.scalers()
        self.generators, self.buffers = Generators(), Buffers((), None) if is_backward else facts.buffers()
        self.gradients = facts.gradients(parameters)
        self._stepped = False

    def optimizer_began(self, optimizer: Optimizer) -> None:
        # Its state may change before the first parameter does.
        self._stepped = True

    def optimizer_returned(self, optimizer: Optimizer) -> None:
        """Its beginning is enough."""

    def reason_against(self) -> str:
        """Why the step cannot be undone, as a sentence; empty where it can."""
        changed = [version_of(item) for item in self.parameters] != self._versions
        if self._stepped or changed:
            return STEPPED
        if not self.gradients.are_known():
            return GRADIENTS_CHANGED
        return "" if self.buffers.are_known() else BUFFER_CHANGED

    def restore(self) -> None:
        """Undo what the step did; see `reason_against`."""
        self.generators.restore()
        self.buffers.restore()
        self.gradients.restore()
        for restore in self._scalers:
            restore()

    def finish(self) -> None:
        """The step has come to its end."""
        self.gradients.finish()
        if self.buffers.are_there():
            self._facts.wrote(self.buffers)
