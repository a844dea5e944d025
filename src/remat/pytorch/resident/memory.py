"""Whoever holds the step's resident memory: its modules, their gradients, their optimizers' state, models beside it.

Adam's state does not exist before its first step, yet it will be there in every later one: it is reserved from the
start (`optimizer_state.py`).
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.pytorch._compat.distributed import gathered_in_graph, gathers_of, group_bytes, is_pretended
from remat.pytorch._compat.tensors import storage_address
from remat.pytorch.device import storage_bytes
from remat.pytorch.reach import dense_parts, innermost, reachable_from, reachable_modules, reachable_optimizers
from remat.pytorch.resident.beside import ModelsBeside
from remat.pytorch.resident.optimizer_state import pending_state_bytes, updated_parameters


@dataclass(frozen=True, slots=True)
class Residents:
    """What was found in memory when someone looked, which takes a while: all that is alive is gone through."""

    present_by_class: dict[str, int]
    pending_bytes: int
    """Optimizer state that is still to come."""
    addresses: frozenset[int]
    gathered_bytes: int = 0
    """Of parameters that are gathered from other ranks for a while, what is there."""

    @property
    def present_bytes(self) -> int:
        return sum(self.present_by_class.values())

    @property
    def bytes_by_class(self) -> dict[str, int]:
        """Optimizer state counts as it will be after the first optimizer step."""
        state = self.present_by_class["optimizer state"] + self.pending_bytes
        return {**self.present_by_class, "optimizer state": state}


class ResidentMemory:
    """The memory of one step that is there before it starts."""

    def __init__(self, step: Any = None, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._step = step
        self._given = tuple(optimizers)
        self._parameters: tuple[torch.Tensor, ...] | None = None
        self._met: dict[int, weakref.ref[nn.Parameter]] = {}
        """Parameters that graphs were called with; all that is known where nobody gave a step."""
        self.beside = ModelsBeside()
        self._parallel: weakref.ref[nn.Module] | None = None
        """The wrapper that calls the step, which keeps buckets for its gradients."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        """As they were last found."""
        self._optimized: weakref.ref[nn.Module] | None = None
        """The module that stands for the step: it may be sharded where the one that was given is not."""

    def meet(self, inputs: Iterable[Any]) -> None:
        """A graph is called with `inputs`."""
        if self._step is None:
            self._met |= {id(item): weakref.ref(item) for item in inputs if isinstance(item, nn.Parameter)}

    def meet_parallel(self, parallel: nn.Module | None) -> None:
        """The step is called by a wrapper that reduces its gradients, or by none."""
        self._parallel = weakref.ref(parallel) if parallel is not None else None

    def meet_optimized(self, module: nn.Module) -> None:
        """The step is a module, and this one takes its place."""
        self._optimized = weakref.ref(module)

    def root(self) -> Any:
        """What resident memory is looked for from."""
        optimized = self._optimized() if self._optimized is not None else None
        if self._step is not None:
            return self._step if optimized is None else optimized
        met = [parameter for reference in self._met.values() if (parameter := reference()) is not None]
        return nn.ParameterList(met)

    def forget(self) -> None:
        """Let go of the step: Dynamo keeps what it compiled, and the session with it, while the process runs."""
        self._step, self._given, self._parameters = None, (), None
        self._met.clear()

    def residents(self, device: torch.device, *, again: bool = False) -> Residents:
        """What is there, or will be after the first optimizer step; `again` takes optimizers to be those of before."""
        before = [item for reference in self._optimizers if (item := reference()) is not None] if again else []
        optimizers = before or self.optimizers()
        self._optimizers = [weakref.ref(item) for item in optimizers]
        parallel = self._parallel() if self._parallel is not None else None
        found = reachable_from([self.root(), *optimizers, *self.beside.models(), parallel])
        # Inputs are counted by the graphs that take them; here only what outlives a step.
        found.tensors["inputs"] = {}
        return Residents(
            found.bytes_by_class(device),
            sum(pending_state_bytes(optimizer, device) for optimizer in optimizers),
            frozenset((*(address for members in found.tensors.values() for address in members), *found.gathered)),
            sum(storage_bytes(tensor, device) for tensor in found.gathered.values()),
        )

    def device(self) -> torch.device:
        return reachable_from(self.root()).device()

    def has_gradients(self) -> bool:
        """Whether an earlier backward left gradients, which this step's will be added to."""
        if self._parameters is None:
            found = reachable_from(self.root()).parameters.values()
            if self._step is None:
                return any(parameter.grad is not None for parameter in found)
            self._parameters = tuple(parameter for parameter in found if parameter.requires_grad)
        return any(parameter.grad is not None for parameter in self._parameters)

    def missing_gradient_bytes(self) -> int:
        """What gradients will take that are not there yet."""
        found = reachable_from(self.root()).parameters.values()
        missing = [item for item in found if item.requires_grad and item.grad is None]
        return sum(int(item.untyped_storage().nbytes()) for item in missing)

    def is_sharded(self) -> bool:
        """Whether parameters are spread over ranks and gathered for a while."""
        return any(group_bytes(module) for module in reachable_modules(self.root()))

    def in_flight_bytes(self, device: torch.device) -> int:
        """The most that a collective over gloo holds when it is over: its thread lets go of buffers a little later."""
        if device.type != "cpu" or is_pretended():
            return 0
        modules = reachable_modules(self.root())
        found = [size for module in modules for size in (*group_bytes(module), *gathered_in_graph(module))]
        return max(found, default=0)

    def gathered_room_bytes(self) -> int:
        """What parameters and gradients that are spread over ranks take at most in one piece, beyond their shards.

        Groups that are kept from forward to backward are all there; of others the one in use and the next, which is
        gathered ahead. Gradients of one group are copied together before they are scattered.
        """
        found: dict[int, tuple[int, bool]] = {}
        for module in reachable_modules(self.root()):
            found |= gathers_of(module)
        sizes = [size for size, _ in found.values()]
        freed = sorted(size for size, is_freed in found.values() if is_freed)
        return sum(sizes) - sum(freed[:-2]) + max(sizes, default=0)

    def parameter_shapes(self) -> str:
        """Of all parameters together, as ranks compare them; those that are spread over ranks by their whole shapes."""
        modules = reachable_modules(self.root())
        found = [f"{name} {tuple(item.shape)}" for module in modules for name, item in module.named_parameters()]
        return f"{len(found)} parameters, {hashlib.sha256(' '.join(found).encode()).hexdigest()[:12]}"

    def given(self, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[int, int]:
        """Addresses and bytes of what the step can reach besides: arguments, tensors that its function names."""
        found = reachable_from(self.root(), args, kwargs)
        device = found.device()
        return {address: storage_bytes(tensor, device) for address, tensor in found.tensors["inputs"].items()}

    def blocks_given(self, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[int, tuple[int, int]]:
        """The same with where the bytes are, too."""
        found = reachable_from(self.root(), args, kwargs)
        return blocks_of(found.tensors["inputs"].values(), found.device())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those given, or else every optimizer alive that updates one of the step's parameters."""
        if self._given:
            return _without_wrappers(self._given)
        parameters = reachable_from(self.root()).parameters
        kinds = _kinds_of(torch.optim.Optimizer)
        found = [item for item in gc.get_objects() if type(item) in kinds]
        return [
            optimizer
            for optimizer in _without_wrappers(found)
            if any(id(parameter) in parameters for parameter in updated_parameters(optimizer))
        ]

    def optimizers_of_step(self) -> list[torch.optim.Optimizer]:
        """Optimizers that the step itself may call: none for a module."""
        if isinstance(self._step, nn.Module) or self._step is None:
            return []
        return list({id(item): item for item in (*self._given, *reachable_optimizers(self._step))}.values())


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, tuple[int, int]]:
    """Addresses of the storages of `tensors`, with their bytes and where those are."""
    return {
        storage_address(part): (storage_bytes(part, device), int(part.untyped_storage().data_ptr()))
        for tensor in tensors
        for part in dense_parts(tensor)
    }


def _kinds_of(kind: type) -> set[type]:
    """The class and all that are derived from it: to ask a million objects for their bases takes half a second."""
    derived: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_kinds_of, derived))


def _without_wrappers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    return list({id(inner): inner for inner in map(innermost, optimizers)}.values())
