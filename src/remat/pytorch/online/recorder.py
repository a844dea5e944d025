"""Sees every op of a step, notes how its results were made, and has room made before it runs.

In: the ops of plain eager PyTorch, below autograd. Ops that write into their arguments make new values; what was there
before counts as given up, or is copied first where it was a constant that others were made from.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from remat.pytorch._compat.engine import in_backward
from remat.pytorch._compat.memory import profiler_is_running
from remat.pytorch._compat.modes import DispatchMode, HigherOrderOperator
from remat.pytorch._compat.tensors import is_plain, schema_of, storage_address
from remat.pytorch.costs.allocations import peak_of, watch
from remat.pytorch.costs.roofline import usual_call_ns
from remat.pytorch.device import rules_of
from remat.pytorch.online.memory import Memory
from remat.pytorch.online.output_sizes import OutputSizes
from remat.pytorch.online.trace import Trace
from remat.pytorch.online.values import Geometry, Made, Use, Value, described, held_parts
from remat.pytorch.reach import tensors_within
from remat.pytorch.rng import RngState

RECOMPUTED = frozenset({"aten", "prims"})
"""Namespaces whose ops give the same bits when they run again; others may talk to somebody or count."""
PASSED = frozenset({"prim", "profiler"})
WRITTEN_SILENTLY = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}
"""Places of running statistics, which the schemas of these ops do not call written."""


SIZES = OutputSizes()
"""Of all contexts: the same shapes come again in the next step."""

Output = tuple[int, Value]
"""A value, and the place of its tensor among an op's results or arguments."""


class OnlineRecorder(DispatchMode):
    """The mode that is active in the context."""

    def __init__(self, memory: Memory, trace: Trace) -> None:
        super().__init__()
        self.memory, self.trace = memory, trace
        self.is_busy = False
        """While values are computed again: what runs then is no op of the step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.run_within(func, args, kwargs)
        if self.is_busy or func.is_view or func.namespace in PASSED:
            return func(*args, **kwargs)
        tensors = list(tensors_within((args, kwargs)))
        if not all(map(can_follow, tensors)):
            return func(*args, **kwargs)
        return self._run(func, args, kwargs, tensors)

    def value_of(self, tensor: torch.Tensor) -> Value:
        """What the tensor's storage holds; a constant where no op was seen to make it."""
        value = self.memory.values.get(tensor)
        if value is None:
            storage = tensor.untyped_storage()
            value = Value(storage, -1, 0)
            self.memory.add(storage, value)
        return value

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        memory, inputs = self.memory, [self.value_of(tensor) for tensor in tensors]
        for value in inputs:
            memory.use(value)
        need = SIZES.guess(func, args, kwargs)
        memory.make_room(need.sure_bytes, need.taken_bytes)
        written = _written_tensors(func, args, kwargs, tensors)
        for place in written:
            self._before_write(inputs[place], tensors[place])
        rng = RngState(_device_type(tensors, kwargs)) if torch.Tag.nondeterministic_seeded in func.tags else None
        is_new = not need.is_watched and _device_type(tensors, kwargs) == "cpu" and not profiler_is_running()
        (result, spent), taken = _watched(func, args, kwargs) if is_new else (_timed(func, args, kwargs), None)
        found = list(tensors_within(result))
        if not all(map(can_follow, found)):
            return result
        need = SIZES.learn(need, self._made_bytes(tensors, found), taken)
        time_ns = self._time_ns(spent, func, args, kwargs, result)
        self._note(_Ran(func, args, kwargs, tensors, inputs, found, written, rng, time_ns), need.sure_bytes)
        # What was foreseen may have been too little.
        memory.make_room(0)
        return result

    def _made_bytes(self, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> int:
        given = {storage_address(item) for item in tensors}
        fresh = {storage_address(item): item for item in found if storage_address(item) not in given}
        return sum(map(_bytes, fresh.values()))

    def _time_ns(self, spent: float, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """As measured; where a device runs ops later, as usual."""
        kind = _device_type(list(tensors_within((args, kwargs, result))), kwargs)
        return spent if kind == "cpu" else usual_call_ns(kind, func, args, kwargs, result)

    def _before_write(self, value: Value, tensor: torch.Tensor) -> None:
        """What a storage holds is about to be gone."""
        self.memory.forget(value)
        value.kept = value.place = None
        if value.made is None and (value.users or held_parts(value, Geometry.of(tensor))[0]):
            copied = tensor.untyped_storage().clone()
            value.size_bytes = rules_of(tensor.device).rounded(copied.nbytes())
            value.hold(copied)
            self.memory.add(copied, value)

    def _note(self, op: _Ran, need: int) -> None:
        self.memory.clock_ns += op.time_ns
        is_backward = in_backward()
        given = {storage_address(item) for item in op.tensors}
        fresh = {storage_address(item): place for place, item in enumerate(op.found)}
        results = [(place, self._new(op.found[place])) for address, place in fresh.items() if address not in given]
        if op.found and not results and not op.written:
            # It returned views of what it was given.
            return
        reads = [number for value in op.inputs for number in value.reads]
        if len(op.written) == 1 and not results and self._merges(op, reads):
            place = op.written[0]
            updates = [(place, self._rewritten(op.tensors[place], op.inputs[place], merged=True))]
        else:
            updates = [(place, self._rewritten(op.tensors[place], op.inputs[place])) for place in op.written]
            numbers = [value.number for _, value in (*results, *updates)]
            traced = self.trace.op(str(op.func), op.time_ns, reads, numbers, backward=is_backward)
            traced.recomputable = self._can_run_again(op) and not updates
        is_constant = any(op.inputs[place].made is None for place, _ in updates)
        if not is_backward and self._can_run_again(op) and not is_constant and (results or updates):
            self._make(op, need, results, updates)

    def _can_run_again(self, op: _Ran) -> bool:
        return op.func.namespace in RECOMPUTED and op.kwargs.get("generator") is None

    def _merges(self, op: _Ran, reads: Sequence[int]) -> bool:
        """Whether the op only finishes what another has begun, as a mask is filled after it was made."""
        before = op.inputs[op.written[0]]
        return before.number >= 0 and self.trace.merge(before.number, op.time_ns, reads)

    def _new(self, tensor: torch.Tensor) -> Value:
        storage, size = tensor.untyped_storage(), _bytes(tensor)
        value = Value(storage, self.trace.value(size), size)
        self.memory.add(storage, value)
        self.memory.use(value)
        return value

    def _rewritten(self, tensor: torch.Tensor, before: Value, *, merged: bool = False) -> Value:
        """What a storage holds after a write: the same bytes, which are counted once."""
        storage = tensor.untyped_storage()
        size = _bytes(tensor) if before.number >= 0 else 0
        if not merged and before.number >= 0:
            self.trace.fix(before.number)
        value = Value(storage, before.number if merged else self.trace.value(0), size)
        value.reads = before.reads if merged else (value.number, *before.reads)
        self.memory.replace(storage, value)
        self.memory.use(value)
        for handle in held_parts(before, Geometry.of(tensor))[1]:
            handle.move(value)
        if value.handles:
            value.kept = storage
        return value

    def _make(self, op: _Ran, need: int, results: Sequence[Output], updates: Sequence[Output]) -> None:
        waiting = iter(op.inputs)
        args, kwargs = described((op.args, op.kwargs), lambda tensor: Use(next(waiting), tensor))
        silent = frozenset(_silently_written(op.func, op.args, op.tensors))
        made = Made(op.func, args, kwargs, frozenset(op.written) | silent, op.time_ns, need, op.rng)
        made.inputs = tuple({id(value): value for value in op.inputs}.values())
        made.results = [(place, weakref.ref(value)) for place, value in results]
        made.updates = [(place, weakref.ref(value)) for place, value in updates]
        for value in made.inputs:
            value.readers.append(weakref.ref(made))
        for _, value in (*results, *updates):
            value.made = made
            if value.kept is not None:
                self.memory.keep(value, value.kept)


class _Ran:
    """One op that has just run."""

    __slots__ = ("args", "found", "func", "inputs", "kwargs", "rng", "tensors", "time_ns", "written")

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[torch.Tensor],
        inputs: Sequence[Value],
        found: Sequence[torch.Tensor],
        written: tuple[int, ...],
        rng: RngState | None,
        time_ns: float,
    ) -> None:
        self.func, self.args, self.kwargs, self.tensors, self.inputs = func, args, kwargs, tensors, inputs
        self.found, self.written, self.rng, self.time_ns = found, written, rng, time_ns


def can_follow(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its storage, and how it lies there."""
    is_whole = is_plain(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_whole and not tensor.is_conj() and not tensor.is_neg()


def _timed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """The result of a call, and nanoseconds."""
    began = time.perf_counter_ns()
    result = func(*args, **kwargs)
    return result, float(time.perf_counter_ns() - began)


def _watched(func: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, float], int]:
    """The same, and the most bytes that it took at once."""
    found, events = watch(lambda: _timed(func, args, kwargs), torch.device("cpu"))
    return found, peak_of(events)


def _bytes(tensor: torch.Tensor) -> int:
    return rules_of(tensor.device).rounded(int(tensor.untyped_storage().nbytes()))


def _device_type(tensors: Sequence[torch.Tensor], kwargs: Any) -> str:
    kinds = {tensor.device.type for tensor in tensors}
    if kwargs.get("device") is not None:
        kinds.add(torch.device(kwargs["device"]).type)
    return next((kind for kind in sorted(kinds) if kind != "cpu"), "cpu")


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an op writes to."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((place, item.name) for place, item in arguments if item.alias_info and item.alias_info.is_write)


def _written_tensors(func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Which of the tensors among the arguments an op writes to, one for each storage."""
    if not _written_arguments(func):
        return ()
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written_arguments(func)]
    addresses = {storage_address(item) for item in tensors_within(given)}
    found = {storage_address(item): place for place, item in reversed(list(enumerate(tensors)))}
    return tuple(sorted(place for address, place in found.items() if address in addresses))


def _silently_written(func: Any, args: Any, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The same for what an op's schema does not tell: a second run writes into copies."""
    places = WRITTEN_SILENTLY.get(func, ())
    addresses = {storage_address(args[place]) for place in places if isinstance(args[place], torch.Tensor)}
    return tuple(place for place, item in enumerate(tensors) if storage_address(item) in addresses)
