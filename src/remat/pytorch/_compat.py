"""Every use of a private torch module, in one place. Tried on torch 2.11 and 2.13.

Each function says which private thing it needs and why no public one does.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import autograd
from torch._C import DispatchKey
from torch._C._autograd import _get_sequence_nr
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import _profiler_enabled
from torch.autograd.graph import _engine_run_backward
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from remat.pytorch.cuda_peak import CudaPeak
from remat.pytorch.ops import define_custom_backward, eager_dropout

__all__ = [
    "BackendCompilerFailed",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "aot_autograd",
    "tree_leaves",
    "tree_map",
]


_TRACED_DIFFERENTLY = (
    torch.ops.aten.lstm.input,
    torch.ops.aten.lstm.data,
    torch.ops.aten.gru.input,
    torch.ops.aten.gru.data,
    torch.ops.aten.rnn_tanh.input,
    torch.ops.aten.rnn_tanh.data,
    torch.ops.aten.rnn_relu.input,
    torch.ops.aten.rnn_relu.data,
)


FAKED_WRONGLY = frozenset({torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten._cudnn_rnn.default})
"""Fused ops whose fake results have the wrong sizes; their backwards read opaque blocks that only they can write."""


def _ask_a_real_run(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What `op` really returns, as fake tensors."""

    def real(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)

    def fake(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)

    with _disable_current_modes():
        found = call_in_grad_mode(op, *tree_map(real, args), **tree_map(real, kwargs))
    with mode:
        return tree_map(fake, found)


@contextlib.contextmanager
def eager_kernels_while_tracing() -> Iterator[None]:
    """Trace dropout and recurrent layers as eager PyTorch computes them.

    While tracing, torch replaces some ops by Python versions that differ from eager in bits and memory: `dropout` by
    `native_dropout`, which eager uses on CUDA only, and recurrent layers by loops of small ops. For the time of the
    trace, dropout gets a faithful version and recurrent layers are left to the C++ composites, as in eager. Fused
    recurrent layers, whose fake versions get sizes and strides wrong, are asked for them by a run on zeros.
    """
    dropout = torch.ops.aten.dropout.default
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    changed = (dropout, *_TRACED_DIFFERENTLY)
    taken = {op: {key: op.py_kernels.pop(key) for key in keys if key in op.py_kernels} for op in changed}
    dropout.py_kernels.update(dict.fromkeys(keys, eager_dropout))
    try:
        for op in changed:
            op._dispatch_cache.clear()
        with true_sizes_of_fused_layers():
            yield
    finally:
        for key in keys:
            dropout.py_kernels.pop(key)
        for op, kernels in taken.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where an op on fake tensors would have to look at values."""


@contextlib.contextmanager
def true_sizes_of_fused_layers() -> Iterator[None]:
    """Let fused recurrent layers tell the sizes of their results by a run on zeros, while tensors are fake."""
    op_implementations_dict.update(dict.fromkeys(FAKED_WRONGLY, _ask_a_real_run))
    try:
        yield
    finally:
        for op in FAKED_WRONGLY:
            op_implementations_dict.pop(op, None)


@contextlib.contextmanager
def kernels_replaced(kernels: Mapping[tuple[Any, str], Callable[..., Any]]) -> Iterator[None]:
    """Let `kernels` stand in for aten ops at dispatch keys, each given as (op, key), for all threads."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for (op, key), kernel in kernels.items():
            library.impl(op.name().removeprefix("aten::"), kernel, key)
        yield
    finally:
        library._destroy()


def decomposes(op: Any) -> bool:
    """Whether `op` is made of other ops, also for autograd."""
    return bool(op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def call_below_autocast(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` as autocast's own kernels do, once they have cast its arguments: without casting again."""
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(DispatchKey.AutocastCPU)):
        return op(*args, **kwargs)


def call_below_autograd(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `op` as one op although it has a decomposition for autograd."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


@contextlib.contextmanager
def fakes_can_be_converted() -> Iterator[None]:
    """Let `module.to(...)` work on fake parameters.

    torch wants to swap their contents, which it refuses while anything refers to them weakly, as fake mode does.
    Here converted parameters take the place of the old ones; tied ones stay tied.
    """
    original = torch.nn.Module._apply
    known: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def converted(convert: Any, tensor: torch.Tensor) -> Any:
        key = (id(convert), id(tensor))
        if key not in known:
            # The old ones are kept, too: an identity must not be given out twice.
            with torch.no_grad():
                known[key] = (convert, tensor, convert(tensor))
        return known[key][2]

    def apply(module: Any, convert: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            child._apply(convert)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found = converted(convert, parameter)
                if not isinstance(found, torch.nn.Parameter):
                    found = torch.nn.Parameter(found, parameter.requires_grad)
                    known[(id(convert), id(parameter))] = (convert, parameter, found)
                module._parameters[name] = found
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = converted(convert, buffer)
        return module

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


@contextlib.contextmanager
def opaque_custom_backwards(targets: Iterable[Any]) -> Iterator[None]:
    """Trace custom ops whose backward looks at data (`offsets.tolist()`) as one op each instead of failing.

    Such a backward cannot run on fake tensors; where it tries to read data, `remat::custom_backward` takes its place
    and calls it when the step runs.
    """
    called = {".".join(str(target).split(".")[:2]) for target in targets}
    definitions = [definition for name, definition in OPDEFS.items() if name.replace("::", ".") in called]
    differentiable = [item for item in definitions if item._backward_fn is not None]
    changed = [(item, item._setup_context_fn, item._backward_fn) for item in differentiable]
    for definition, setup, backward in changed:
        definition._setup_context_fn = functools.partial(_setup_and_keep_inputs, setup)
        definition._backward_fn = functools.partial(_backward_or_opaque, definition._qualname, backward)
    try:
        yield
    finally:
        for definition, setup, backward in changed:
            definition._setup_context_fn, definition._backward_fn = setup, backward


def _setup_and_keep_inputs(setup: Any, ctx: Any, inputs: Any, output: Any, **kwargs: Any) -> None:
    ctx.remat_inputs = inputs
    if setup is not None:
        setup(ctx=ctx, inputs=inputs, output=output, **kwargs)


def _backward_or_opaque(name: str, backward: Any, ctx: Any, *grads: Any) -> Any:
    try:
        return backward(ctx, *grads)
    except DataDependentOutputException:
        inputs = ctx.remat_inputs
        if not all(isinstance(item, torch.Tensor) for item in (*inputs, *grads)):
            raise
        found = iter(torch.ops.remat.custom_backward(name, list(inputs), list(grads)))
        return tuple(next(found) if item.is_floating_point() else None for item in inputs)


def custom_backward(name: str, inputs: list[torch.Tensor], grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run the registered backward of custom op `name`, or autograd over a second forward where it needs outputs."""
    definition = OPDEFS[name]
    if definition._setup_context_fn is not None:
        context = _StandIn(inputs)
        try:
            definition._setup_context_fn(ctx=context, inputs=tuple(inputs), output=None)
            found = definition._backward_fn(context, *grads)
            return [grad for grad, item in zip(found, inputs, strict=True) if item.is_floating_point()]
        except (AttributeError, TypeError):
            # It wants the op's output, so autograd has to call it; an error of its own comes up again there.
            pass
    with torch.enable_grad():
        leaves = [item.detach().requires_grad_(item.is_floating_point()) for item in inputs]
        output = definition(*leaves)
        return list(torch.autograd.grad(output, [leaf for leaf in leaves if leaf.requires_grad], grads))


class _StandIn:
    """The part of an autograd context that a custom op's backward uses."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self.saved_tensors: tuple[torch.Tensor, ...] = ()
        self.needs_input_grad = tuple(item.is_floating_point() for item in inputs)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def backward_outside_autocast() -> contextlib.AbstractContextManager[Any]:
    """Trace backward as it runs when called outside `torch.autocast`, as PyTorch's documentation recommends."""
    return functorch_config.patch(backward_pass_autocast="off")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Compile as if no TorchDispatchMode of the user's were active; it will see the ops when they run."""
    with _disable_current_modes():
        yield


def modes_active() -> bool:
    """Whether a TorchDispatchMode is active in this thread."""
    return bool(python_dispatch._get_current_dispatch_mode_stack())


@dataclass(frozen=True, slots=True)
class GraphEnd:
    """Why Dynamo ended a graph, and in which function."""

    function: str
    is_break: bool
    reason: str

    @property
    def is_backward_call(self) -> bool:
        """`loss.backward()` inside the step: the natural end of its forward."""
        return "backward" in self.reason and "Tensor" in self.reason


def graph_end(module: torch.fx.GraphModule) -> GraphEnd:
    """How the graph that Dynamo handed in ends: with its function, or with something Dynamo cannot trace."""
    reason = module.compile_subgraph_reason
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f" ({frame.filename}:{frame.lineno})" if frame is not None else ""
    text = str(reason.reason).strip().split("\n")[0]
    if reason.graph_break and " " not in text and counters["graph_break"]:
        # A one-word reason hides the sentence that Dynamo counted last.
        text = next(reversed(counters["graph_break"])).strip().split("\n")[0]
    text += place
    return GraphEnd(frame.name if frame is not None else "", bool(reason.graph_break), text)


def breaks_counted() -> dict[str, int]:
    """Why Dynamo has ended graphs or given up on functions so far, and how often."""
    return dict(counters["graph_break"])


def break_sentence(reason: str) -> str:
    """What Dynamo met and why it cannot trace it; empty for what ends every training step by its nature."""
    lines = [line.strip() for line in reason.strip().split("\n")]
    ends_step = any(word in reason for word in ("backward", "Optimizer.", "torch.compiler.disable"))
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return "" if ends_step else f"{lines[0]}: {explained}".rstrip(": ")


def log_messages_skipped() -> contextlib.AbstractContextManager[None]:
    """Leave log messages out of what Dynamo traces: each would break the graph, often between logits and loss."""
    return _dynamo_patched()


@contextlib.contextmanager
def dynamo_settings(device: torch.device) -> Iterator[None]:
    """Trace recurrent layers, skip log messages instead of breaking the graph, and plan a step met in many shapes."""
    with (
        _dynamo_patched(allow_rnn=True, recompile_limit=64),
        _recurrent_layers_untraced() if device.type == "cuda" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _dynamo_patched(**settings: Any) -> Iterator[None]:
    # torch 2.11 sorts its settings to write them into a log that is off, and complains that functions have no order.
    metrics = logging.getLogger("torch._dynamo.metrics_context")
    was_disabled, metrics.disabled = metrics.disabled, True
    renamed = hasattr(dynamo_config, "ignore_logging_functions")
    ignore = "ignore_logging_functions" if renamed else "ignore_logger_methods"
    try:
        with dynamo_config.patch(**{ignore: _log_functions(), **settings}):
            yield
    finally:
        metrics.disabled = was_disabled


def _log_functions() -> set[Any]:
    names = ("debug", "info", "warning", "warning_once", "warning_advice", "info_once")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


@contextlib.contextmanager
def _recurrent_layers_untraced() -> Iterator[None]:
    """The graph breaks around them: cuDNN's dropout draws a number that no fake tensor can give."""
    traced = {layer: layer.forward for layer in _untraced_recurrent()}
    for layer, forward in _untraced_recurrent().items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer, forward in traced.items():
            layer.forward = forward


@functools.cache
def _untraced_recurrent() -> dict[Any, Any]:
    layers: tuple[Any, ...] = (torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU)
    reason = "cuDNN's recurrent layers cannot be traced"
    return {layer: torch.compiler.disable(layer.forward, reason=reason) for layer in layers}


@contextlib.contextmanager
def planned_under_modes() -> Iterator[None]:
    """Run compiled code although a TorchDispatchMode is active.

    Dynamo falls back to plain eager under a mode, because compiled kernels would hide ops from it. Ours are eager
    kernels, which the mode sees one by one, so the plan stays in force under loggers, counters and trackers.
    """
    if not python_dispatch._is_in_any_mode_without_ignore_compile_internals:
        yield
        return
    # From 2.13 on Dynamo looks at the stack of modes, unless told to ask the flag as before.
    asks_stack = "inline_torch_dispatch_torch_compile"
    settings = (
        dynamo_config.patch({asks_stack: False}) if hasattr(dynamo_config, asks_stack) else contextlib.nullcontext()
    )
    _set_in_mode(False)
    try:
        with settings:
            yield
    finally:
        _set_in_mode(True)


def _set_in_mode(value: bool) -> None:
    python_dispatch._is_in_any_mode_without_ignore_compile_internals = value
    set_is_in_mode_without_ignore_compile_internals(value)


@contextlib.contextmanager
def untraced(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep Dynamo out of `optimizer.step()`: traced, it takes another path and gives other bits."""
    for optimizer in optimizers:
        optimizer.step = torch.compiler.disable(type(optimizer).step.__get__(optimizer))
    try:
        yield
    finally:
        for optimizer in optimizers:
            del optimizer.__dict__["step"]


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes allocated between two marks, counted from an origin of the meter's own."""

    peak_bytes: int
    end_bytes: int


class Meter:
    """Follows what is allocated on a device, from mark to mark.

    On CPU the profiler tells. It belongs to the user's thread, so `stop` must be called there; in backward only marks
    are set, and `on_engine_return` is called once the autograd engine is back. It must not be stopped and started
    again inside one op. On CUDA the allocator's counters tell; its peak starts anew at each mark.
    """

    MARK = "remat: mark"

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._profiler: torch.profiler.profile | None = None
        self._windows: list[Window] = []
        self._peak: CudaPeak | None = None
        self._on_engine_return: Callable[[], None] = lambda: None

    @property
    def is_running(self) -> bool:
        return self._device is not None

    @property
    def device_type(self) -> str:
        """Where it looks; empty while it does not."""
        return self._device.type if self._device is not None else ""

    def start(self, device: torch.device, on_engine_return: Callable[[], None]) -> None:
        """Begin anew."""
        self._windows, self._on_engine_return = [], on_engine_return
        if device.type == "cuda":
            self._peak = CudaPeak(device)
            self._peak.open()
        elif _profiler_enabled():
            # Another profiler watches this step already; a later step will do.
            return
        else:
            self._profiler = allocation_profiler()
            self._profiler.start()
        self._device = device
        watch_engine(self)

    def mark(self) -> None:
        """A window ends here."""
        if self._peak is not None:
            self._windows.append(Window(self._peak.take(), torch.cuda.memory_allocated(self._device)))
        elif self._device is not None:
            with torch.autograd.profiler.record_function(self.MARK):
                return

    def stop(self) -> list[Window]:
        """The windows between the start, the marks and now; none where nobody looked."""
        if self._device is None:
            return []
        self.mark()
        profiler, self._profiler, self._device = self._profiler, None, None
        unwatch_engine(self)
        if self._peak is not None:
            self._peak.close()
            self._peak = None
        if profiler is None:
            return self._windows
        profiler.stop()
        return list(_windows(cpu_allocation_events(profiler, self.MARK)))

    def engine_began(self) -> None:
        pass

    def engine_returned(self) -> None:
        self._on_engine_return()


class EngineWatcher(Protocol):
    """Is told, in the user's thread, when the autograd engine is called and when it is back."""

    def engine_began(self) -> None: ...

    def engine_returned(self) -> None: ...


_engine_watchers: list[EngineWatcher] = []
"""Several steps can be watched at once on CUDA."""


def watch_engine(watcher: EngineWatcher) -> None:
    """No public hook tells when `backward` and `grad` hand over to the engine; both call it by this name."""
    _engine_watchers.append(watcher)
    autograd._engine_run_backward = _run_backward


def unwatch_engine(watcher: EngineWatcher) -> None:
    _engine_watchers.remove(watcher)
    if not _engine_watchers:
        autograd._engine_run_backward = _engine_run_backward


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    for watcher in list(_engine_watchers):
        watcher.engine_began()
    try:
        return _engine_run_backward(*args, **kwargs)
    finally:
        for watcher in list(_engine_watchers):
            watcher.engine_returned()


def _windows(events: Iterable[tuple[int, int]]) -> Iterator[Window]:
    """Windows from (address, bytes) of allocations and frees; a mark has address 0."""
    current = peak = 0
    live: dict[int, int] = {}
    for address, size in events:
        if address == 0:
            yield Window(peak, current)
            peak = current
        elif size > 0:
            live[address] = size
            current += size
            peak = max(peak, current)
        else:
            # What was there before may die now, for whatever reason: it was not counted.
            current -= live.pop(address, 0)


def call_in_grad_mode(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op that looks at the grad mode to decide what it returns, without recording a graph."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return op(*args, **kwargs)


ASK_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})
"""Ops that return what their backward needs only while gradients are enabled."""


def leave_absent_gradients_absent() -> None:
    """Ask autograd not to fill in zeros for outputs that receive no gradient.

    Called while AOTAutograd's autograd function runs its forward; its context is only to be had from that frame.
    Where it cannot be found zeros arrive, which is right but takes memory.
    """
    frame = sys._getframe(1)
    while frame is not None:
        context = frame.f_locals.get("ctx")
        if isinstance(context, autograd.function.FunctionCtx):
            context.set_materialize_grads(False)
            return
        frame = frame.f_back  # type: ignore[assignment]


def keeps_graph() -> bool:
    """Whether the backward pass now running was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def allocation_profiler() -> torch.profiler.profile:
    """A profiler that sees allocations on the CPU."""
    # Its own library announces every start on stderr unless told not to before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def profiler_is_running() -> bool:
    """Whether a profiler of anybody's watches this thread; there can be only one."""
    return bool(_profiler_enabled())


def op_range(name: str) -> Any:
    """A context manager that leaves a named range in the profiler's events; the public one costs ten times as much."""
    return _RecordFunctionFast(name)


@dataclass(frozen=True, slots=True)
class CpuEvents:
    """What a finished profiler saw on the CPU, in order of time."""

    ranges: list[tuple[int, int]]
    """(start, end) in nanoseconds of every range with the name asked for."""
    allocations: list[tuple[int, int, int]]
    """(time in nanoseconds, address, bytes), bytes below zero for a free."""


def cpu_events(profiler: torch.profiler.profile, name: str) -> CpuEvents:
    """The ranges called `name` and every allocation; see `cpu_allocation_events`."""
    ranges: list[tuple[int, int]] = []
    allocations: list[tuple[int, int, int]] = []
    pending = _take_event_tree(profiler)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == name:
            ranges.append((event.start_time_ns, event.end_time_ns))
    ranges.sort()
    allocations.sort(key=lambda item: item[0])
    return CpuEvents(ranges, allocations)


def next_node_number() -> int:
    """The sequence number that the next autograd node made in this thread will get."""
    return int(_get_sequence_nr())


def running_node() -> Any:
    """The autograd node that the engine is evaluating in this thread; None outside backward."""
    return torch._C._current_autograd_node()


def _take_event_tree(profiler: torch.profiler.profile) -> list[Any]:
    """The roots of a finished profiler's events.

    The profiler itself lies in a reference cycle, and its results crash now and then if they are still there when
    Python exits; so they are dropped here.
    """
    results, profiler.profiler.kineto_results = profiler.profiler.kineto_results, None
    return list(results.experimental_event_tree())


def cpu_allocation_events(profiler: torch.profiler.profile, mark: str = "") -> list[tuple[int, int]]:
    """(address, bytes) of every CPU allocation and free a finished profiler saw, in order; (0, 0) for each `mark`.

    The public tables only have sums for each op; the event tree has the allocations themselves.
    """
    found: list[tuple[int, int, int]] = []
    pending = _take_event_tree(profiler)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif mark and event.name == mark:
            found.append((event.start_time_ns, 0, 0))
    found.sort(key=lambda item: item[0])
    return [(address, size) for _, address, size in found]


@contextlib.contextmanager
def record_cuda_allocations() -> Iterator[None]:
    """Let the caching allocator keep its history (documented, though its name is private)."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=10_000_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def cuda_allocation_events(device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of what the caching allocator handed out and took back, in order."""
    traces = torch.cuda.memory._snapshot()["device_traces"]
    sign = {"alloc": 1, "free_completed": -1}
    events = traces[device.index or 0] if traces else []
    return [(event["addr"], sign[event["action"]] * event["size"]) for event in events if event["action"] in sign]


define_custom_backward(custom_backward)


def expandable_segments() -> bool:
    """Whether the CUDA allocator makes new segments of pages that it can put together anew."""
    return bool(torch.cuda.memory._snapshot().get("allocator_settings", {}).get("expandable_segments", False))


def set_expandable_segments(on: bool) -> None:
    # Its name under torch.cuda is deprecated where this one is there.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(f"expandable_segments:{on}")
