"""Steps of which nothing can be captured: run as they are, within the budget by `remat.dtr`.

In: a session without a graph, and the calls of its step. Out: their results. What autograd saves is given up where
memory would run short, and computed again in backward. A share of the plain peak is one of the first of these steps,
which runs as it is while its memory is counted.

Code may also take another path while it is traced, and what the tracer could not follow then runs with what that path
has made: it fails, and would not without Remat. A module that is as it was before such a call runs as it is written.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, BudgetUnit
from remat.pytorch._compat.trees import tree_leaves
from remat.pytorch.device import total_bytes
from remat.pytorch.generators import Generators
from remat.pytorch.resident.memory import ResidentMemory


@dataclass(slots=True)
class UncapturedSteps:
    """Runs one step after the other under the same budget."""

    budget: Budget
    owner: ResidentMemory
    _plain_bytes: int = 0
    """What a step that was counted made, at its peak."""
    _open: list[weakref.ref[Any]] = field(default_factory=list)
    """Contexts of earlier calls, which may still hold what they saved."""

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from remat.pytorch.online.dtr import Online

        self._open = [item for item in self._open if item() is not None]
        context = Online(self._allowed_bytes(args, kwargs))
        with context:
            result = step(*args, **kwargs)
        if context.budget_bytes == sys.maxsize:
            self._plain_bytes = context.peak_bytes
        self._open.append(weakref.ref(context))
        return result

    def _allowed_bytes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        device = self.owner.device()
        residents = self.owner.residents(device, again=True)
        given = sum(self.owner.given(args, dict(kwargs)).values())
        resident = sum(residents.bytes_by_class.values()) + self.owner.missing_gradient_bytes() + given
        if self.budget.unit is BudgetUnit.PLAIN_FRACTION and not self._plain_bytes:
            return sys.maxsize
        allowed = self.budget.resolve(plain_peak_bytes=resident + self._plain_bytes, device_bytes=total_bytes(device))
        held = sum(context.memory.live_bytes for item in self._open if (context := item()) is not None)
        # A step that cannot fit runs with as little as it can: training that has begun goes on.
        return max(1, allowed - resident - held)


def wants_gradients(result: Any) -> bool:
    """Whether a backward may follow."""
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tree_leaves(result))


class BeforeCall:
    """What a call of a module may change that outlives it."""

    __slots__ = ("_generators", "_module", "_versions")

    def __init__(self, module: nn.Module) -> None:
        self._module, self._generators, self._versions = module, Generators(), _versions(module)

    def put_back(self) -> bool:
        """Whether nothing has been written to, so that the call can be made again; generators are then as they were."""
        if _versions(self._module) != self._versions:
            return False
        self._generators.restore()
        return True


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    """Which tensors the module has, gradients included, and how often each was written to."""
    parameters = list(module.parameters())
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    tensors: chain[torch.Tensor] = chain(parameters, module.buffers(), gradients)
    return [(id(tensor), tensor._version) for tensor in tensors]
