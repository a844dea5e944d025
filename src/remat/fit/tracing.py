"""A model with its batch becomes a `StepTrace`, on fake tensors: nothing of the model's size is allocated.

The step runs once as `remat.estimate` runs it, with the kernels that the device asked for would choose. Times are the
roofline's for a device of the catalogue that is not here; on this machine's own device every distinct op is measured
once and kept in the cost cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remat.core.devices import DeviceKind
from remat.core.memory_rules import memory_rules
from remat.core.results.profile import MemoryClass, Phase
from remat.fit.levers import Precision
from remat.fit.step_trace import StepTrace, TraceBuilder, TracedCall, TracedParameter
from remat.pytorch._compat.fakes import fakes_can_be_converted
from remat.pytorch._compat.tensors import schema_of
from remat.pytorch.costs.calls import touched_bytes
from remat.pytorch.costs.fake_copies import FakeCopies
from remat.pytorch.costs.op_costs import costs_of
from remat.pytorch.estimate.estimate_step import EstimateTarget, follow_step, home_of, target_of
from remat.pytorch.estimate.fake_costs import LONGEST_TRIAL_NS, FakeClock, OwnClock
from remat.pytorch.explore.module_blocks import checkpointed, repeated_blocks
from remat.pytorch.explore.resize import resized, size_along
from remat.pytorch.measure.follow import Follower, written_arguments
from remat.pytorch.measure.training_step import TrainingStep
from remat.pytorch.reach import tensors_within
from remat.zoo.example import Example

_AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_UPDATES_STATISTICS = "batch_norm"
"""Ops that write to running statistics; what they return they can return again."""
TRIAL_SHARE = 0.25
"""Of a GPU's free memory, what an op that is measured may read and write."""


def trace_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    precision: Precision = Precision.FP32,
    gpu: str | None = None,
    devices: Iterable[str | Path] = (),
    layers: int | None = None,
    per_block: bool = False,
    batch: int | None = None,
) -> StepTrace:
    """Forward and backward of `model(*args, **kwargs)`; with `per_block`, every block is checkpointed.

    `layers`: only so many members of each list of blocks. `batch`: so many samples, whatever was given.
    """
    target = target_of(model, gpu, devices)
    copies = FakeCopies(home_of(model), target.fakes)
    given = copies.of_arguments((tuple(args), dict(kwargs)))
    homes = block_lists(model) if layers is not None else []
    fake = copies.of_model(model, without=[block for home in homes for block in [*model.get_submodule(home)][layers:]])
    for home in homes:
        del fake.get_submodule(home)[layers:]
    with copies.mode, torch.enable_grad():
        if precision is Precision.PURE_BF16:
            with fakes_can_be_converted():
                fake.to(torch.bfloat16)
            given = _lowered(given)
        example = Example(fake, *given)
        if batch is not None and batch != size_along(example, "batch"):
            example = resized(example, "batch", batch)
        step = TrainingStep(fake, example.args, example.kwargs, precision=_AUTOCAST.get(precision))
        tracer = StepTracer(target, fake)
        with checkpointed(fake) if per_block else nullcontext():
            follow_step(step, target, tracer)
    return tracer.trace()


class StepTracer(Follower):
    """A follower that also notes what every op reads, writes and makes."""

    def __init__(self, target: EstimateTarget, model: nn.Module) -> None:
        clock = MeasuringClock(target.device, target.fakes) if target.is_own else FakeClock(target.device)
        super().__init__(target.ledger(clock), clock, [model])
        self._model, self._target, self._times = model, target, clock
        self._touched: list[_Touched] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.op_count
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.op_count > before:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read = self._items((args, kwargs))
        written = self._items([args[place] for place in written_arguments(func) if place < len(args)])
        made = {key: item for key, item in self._items(result).items() if key not in read}
        writes_elsewhere = schema_of(func).is_mutable and not written and _UPDATES_STATISTICS not in str(func)
        self._touched.append(_Touched(read, written, made, may_run_twice=not writes_elsewhere))

    def _items(self, tree: Any) -> dict[int, Any]:
        found = (self._storages.known(tensor) for tensor in tensors_within(tree))
        return {id(item): item for item in found if item is not None}

    def trace(self) -> StepTrace:
        builder, numbers = self._built()
        items = {id(item): item for item in self._storages}
        gradients = {
            value: items[key].name.removeprefix("gradient of ")
            for key, value in numbers.items()
            if items[key].kind is MemoryClass.GRADIENT
        }
        # What lives when the step is over is an output; gradients were dropped by then.
        outputs = (value for key, value in numbers.items() if items[key].seen.last_op is None)
        return StepTrace(
            calls=builder.calls,
            sizes=tuple(builder.sizes),
            gradients=gradients,
            outputs=tuple(value for value in outputs if value not in gradients),
            parameters=tuple(_parameter(name, item) for name, item in self._model.named_parameters()),
            buffer_bytes=self._class_bytes(items.values(), MemoryClass.BUFFER),
            input_bytes=self._class_bytes(items.values(), MemoryClass.INPUT),
            held_bytes=self._held_bytes(),
            grain_bytes=memory_rules(self._target.device.kind.value).size_step_bytes,
            blocks=repeated_blocks(self._model),
        )

    def _built(self) -> tuple[TraceBuilder, dict[int, int]]:
        """All ops, and the numbers of the values that they made, by the identity of what was followed."""
        builder, numbers, places = TraceBuilder(), dict[int, int](), list[int]()
        times, workspaces = self._times.times_ns(), self._times.workspaces([0] * self.op_count)
        for op, touched, time_ns, workspace in zip(self._ops, self._touched, times, workspaces, strict=True):
            reads = tuple(numbers[key] for key in touched.read if key in numbers)
            written = [numbers[key] for key in touched.written if key in numbers]
            backward = op.phase in (Phase.BACKWARD, Phase.RECOMPUTE)
            call = TracedCall(op.target, op.module, backward, time_ns, workspace, reads, (), touched.may_run_twice)
            made = builder.add(call, [item.seen.size_bytes for item in touched.made.values()], written)
            numbers.update(zip(touched.made, made, strict=True))
            places.append(builder.place)
        for item in self._storages:
            if id(item) in numbers and item.seen.last_op is not None and item.kind is not MemoryClass.GRADIENT:
                builder.hold(numbers[id(item)], places[item.seen.last_op])
        return builder, numbers

    def _held_bytes(self) -> int:
        found: list[Any] = []
        return sum(span.size_bytes for span in self._ledger.account(found, self.op_count).others)

    def _class_bytes(self, items: Iterable[Any], kind: MemoryClass) -> int:
        return sum(item.seen.size_bytes for item in items if item.kind is kind and not item.seen.is_result)


@dataclass(slots=True)
class _Touched:
    """Storages by identity, as they were followed."""

    read: dict[int, Any]
    written: dict[int, Any]
    made: dict[int, Any] = field(default_factory=dict)
    may_run_twice: bool = True


class MeasuringClock(OwnClock):
    """Times and workspace by trial on the device in use; the roofline's where an op is too large to be tried."""

    def __init__(self, device: Any, own: torch.device) -> None:
        super().__init__(device, own)
        free = torch.cuda.mem_get_info(own)[0] if device.kind is DeviceKind.CUDA else 4 << 30
        self._most_bytes = int(TRIAL_SHARE * free)

    def end(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        FakeClock.end(self, op, args, kwargs, result)
        touched = touched_bytes((args, kwargs, result))
        self._touched.append(touched)
        is_moderate = touched <= self._most_bytes and self._times[-1] <= LONGEST_TRIAL_NS
        self._calls.add(op, args, kwargs, result, is_moderate)

    def times_ns(self) -> list[float]:
        known = self._known()
        pairs = zip(self._calls.keys, self._times, strict=True)
        return [known[key].time_ns if key else time for key, time in pairs]

    def workspaces(self, live_bytes: Sequence[int]) -> list[int]:
        known = self._known()
        pairs = zip(self._calls.keys, self._workspaces, strict=True)
        return [known[key].workspace_bytes if key else need for key, need in pairs]

    def _known(self) -> dict[str, Any]:
        return costs_of(self._calls.nodes(key for key in self._calls.keys if key), self._own)


def _parameter(name: str, item: torch.Tensor) -> TracedParameter:
    rows = item.shape[0] if item.dim() else 1
    return TracedParameter(name, item.numel(), item.element_size(), item.requires_grad, rows)


def block_lists(model: nn.Module) -> list[str]:
    """The names of the lists in which blocks lie."""
    homes = list(dict.fromkeys(name.rpartition(".")[0] for name in repeated_blocks(model)))
    lists = (nn.ModuleList, nn.Sequential)
    assert all(isinstance(model.get_submodule(home), lists) for home in homes), "blocks lie in lists"
    return homes


def _lowered(batch: Any) -> Any:
    """Arguments for a model in bf16: its numbers with fractions are bf16 too."""
    from remat.pytorch._compat.trees import tree_map

    def lower(item: Any) -> Any:
        is_real = isinstance(item, torch.Tensor) and item.is_floating_point()
        return item.to(torch.bfloat16) if is_real else item

    return tree_map(lower, batch)
