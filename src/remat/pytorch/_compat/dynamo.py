"""Dynamo: its settings while a step is captured, where and why it ends a graph, and what code asks of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
import types
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, external_utils, trace_rules
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import Unsupported, UserError
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters, guard_failures
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx import GraphModule

from remat.integrations.masks import is_counted_up
from remat.pytorch._compat.averaged_norm import averages_as_ops, averaging_forward
from remat.pytorch._compat.fakes import calls_remembered, refused_fakes_asked
from remat.pytorch._compat.layer_drop import draws_compared
from remat.pytorch._compat.modes import without_modes
from remat.pytorch._compat.numbers import changing_numbers_as_inputs, changing_shapes_left_open
from remat.pytorch._compat.replaced import replaced, settings_changed

torch.compiler.allow_in_graph(is_counted_up)

LINEAR, SET_GRAD_ENABLED = torch._C._nn.linear, torch._C._set_grad_enabled
ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""Functions that Dynamo writes into its graphs."""


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


def graph_end(module: GraphModule) -> GraphEnd:
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


_ENDS = ("backward()", "run_backward", "qualname: backward", "Optimizer.", "torch.compiler.disable")
"""Words by which Dynamo tells of what ends every training step by its nature."""


def break_sentence(reason: str) -> str:
    """What Dynamo met and why it cannot trace it; empty for what ends every training step by its nature."""
    lines = [line.strip() for line in reason.strip().split("\n")]
    ends_step = any(word in reason for word in _ENDS)
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return "" if ends_step else f"{lines[0]}: {explained}".rstrip(": ")


@contextlib.contextmanager
def failures_noted() -> Iterator[list[str]]:
    """Functions whose tracing fails run as they are, with all that they call; gives what was wrong.

    Dynamo would raise where an op does not like fake tensors, though the step runs in eager, or write a page of log.
    """
    whole = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    failed: list[str] = []
    log, words = logging.getLogger("torch._dynamo.convert_frame"), convert_frame.format_error_msg

    def note(error: Exception, *args: Any) -> str:
        # Dynamo asks for these words when it goes on without what it could not trace, then looks at the strategy.
        if not isinstance(error, (Unsupported, UserError)):
            error.frame_exec_strategy = whole  # type: ignore[attr-defined]
            failed.append(str(error))
        return words(error, *args)

    def is_told_by_dynamo(record: logging.LogRecord) -> bool:
        return record.exc_info is None or record.levelno < logging.WARNING

    log.addFilter(is_told_by_dynamo)
    convert_frame.format_error_msg = note
    try:
        with _dynamo_patched(suppress_errors=True):
            yield failed
    finally:
        convert_frame.format_error_msg = words
        log.removeFilter(is_told_by_dynamo)


def log_messages_skipped() -> contextlib.AbstractContextManager[None]:
    """Leave log messages out of what Dynamo traces: each would break the graph, often between logits and loss."""
    return _dynamo_patched()


def recapture_reason(code: types.CodeType) -> str:
    """What was not as before when Dynamo last traced a function again; empty where it does not tell."""
    reasons = guard_failures.get(code) or [""]
    return re.sub(r"^[0-9/]+: ", "", str(reasons[-1]).strip().split("\n")[0].split("  #")[0]).strip()


_MOST_GRAPHS = 1_000_000
"""Dynamo would give up after a few, and the step would run unplanned."""


def forget_code(code: types.CodeType) -> None:
    """Drop what Dynamo compiled for a function, or that it gave up on it; `torch.compiler.reset` does so for all."""
    reset_code(code)
    # Guards on what never dies, as classes of torch, would stay with all that they hold.
    for finalizer, info in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]
        checks = getattr(getattr(info.func, "func", None), "__self__", None)
        if isinstance(checks, CheckFunctionManager) and _is_dropped(checks):
            finalizer.detach()


def _is_dropped(checks: CheckFunctionManager) -> bool:
    return getattr(getattr(checks, "guard_manager", None), "cache_entry", None) is None


@contextlib.contextmanager
def dynamo_settings(device: torch.device, *, leaves_open: bool = False) -> Iterator[None]:
    """Trace recurrent layers and batch norms that average, skip log messages instead of breaking the graph, plan a step
    met in many shapes, see hooks that come later, and leave a graph whole inside DistributedDataParallel. Sizes that
    change may be left open.
    """
    with (
        _dynamo_patched(
            allow_rnn=True,
            recompile_limit=_MOST_GRAPHS,
            accumulated_recompile_limit=_MOST_GRAPHS,
            skip_nnmodule_hook_guards=False,
            optimize_ddp=False,
        ),
        changing_numbers_as_inputs(),
        changing_shapes_left_open() if leaves_open else contextlib.nullcontext(),
        draws_compared(),
        _ops_as_written(),
        replaced(trace_rules, "check", _layers_traced_alone_and_remat_never),
        positions_looked_at(),
        refused_fakes_asked(),
        calls_remembered(),
        recurrent_layers_untraced() if device.type == "cuda" else contextlib.nullcontext(),
        averages_as_ops() if device.type == "cpu" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def positions_looked_at() -> Iterator[None]:
    """Answer `is_counted_up` by what the graph says: a tensor made of constants alone has values that are known."""
    handlers = TorchInGraphFunctionVariable._get_handlers()

    def answer(variable: Any, translator: Any, positions: Any) -> Any:
        value = _known_value(positions.as_proxy().node)
        return ConstantVariable.create(value is not None and bool((value.diff(dim=-1) == 1).all()))

    known = handlers.get(is_counted_up)
    handlers[is_counted_up] = answer
    try:
        yield
    finally:
        if known is None:
            del handlers[is_counted_up]


def _known_value(node: Any) -> torch.Tensor | None:
    """What a node of Dynamo's graph will hold; None where that depends on what the graph is given."""
    if node.op not in ("call_function", "call_method"):
        return None
    values = {item: _known_value(item) for item in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    call = node.target if node.op == "call_function" else operator.methodcaller(node.target, *args[1:], **kwargs)
    with without_modes(), torch.no_grad():
        found = call(*args, **kwargs) if node.op == "call_function" else call(args[0])
    return found if isinstance(found, torch.Tensor) else None


def _layers_traced_alone_and_remat_never(check: Any) -> Any:
    """Where Dynamo gives up on a function, as on a loop over layers that asks for a value, trace the layers that it
    calls: those of the user's own classes it does trace, those of torch.nn it would leave out. What Remat runs between
    two graphs is none of its business.
    """

    def checked(item: Any, *args: Any, **options: Any) -> bool:
        if not isinstance(item, types.CodeType):
            return bool(check(item, *args, **options))
        is_layer = (item.co_name == "forward" and _LAYERS in item.co_filename) or item is averaging_forward.__code__
        if item.co_filename.startswith(_OWN) and not item.co_name.startswith(ROOT) and not is_layer:
            return True
        return not is_layer and bool(check(item, *args, **options))

    return checked


_LAYERS = str(Path("torch", "nn", "modules"))
_OWN = str(Path(__file__).parents[1])
ROOT = "remat_step_"
"""How the names of functions begin that stand for optimized steps."""


@contextlib.contextmanager
def _ops_as_written() -> Iterator[None]:
    """Keep Dynamo from taking `add_` with a factor, `addcmul_` and `addcdiv` apart: rounded twice, they give other
    bits. And from drawing NumPy's random numbers, as for masks of speech, from torch's generator.
    """
    setting = "enable_dynamo_decompositions"
    off = {setting: False} if hasattr(dynamo_config, setting) else {}
    off["use_numpy_random_stream"] = True
    handlers = TorchInGraphFunctionVariable._get_handlers()
    taken = {function: handlers.pop(function) for function in (torch.addcdiv,) if function in handlers}
    try:
        with settings_changed(dynamo_config, **off):
            yield
    finally:
        handlers.update(taken)


@contextlib.contextmanager
def _dynamo_patched(**settings: Any) -> Iterator[None]:
    # torch 2.11 sorts its settings to write them into a log that is off, and complains that functions have no order.
    metrics = logging.getLogger("torch._dynamo.metrics_context")
    was_disabled, metrics.disabled = metrics.disabled, True
    renamed = hasattr(dynamo_config, "ignore_logging_functions")
    ignore = "ignore_logging_functions" if renamed else "ignore_logger_methods"
    # On Python 3.12 guards of torch 2.11 are written to when a dict that they watched dies, be they gone or not.
    no_watched_dicts = {"use_recursive_dict_tags_for_guards": False}
    try:
        with settings_changed(dynamo_config, **{ignore: _log_functions()}, **no_watched_dicts, **settings):
            yield
    finally:
        metrics.disabled = was_disabled


def _log_functions() -> set[Any]:
    names = ("debug", "info", "warning", "warning_once", "warning_advice", "info_once")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


@contextlib.contextmanager
def recurrent_layers_untraced() -> Iterator[None]:
    """The graph breaks around them, as for torch.compile.

    cuDNN's dropout draws a number that no fake tensor can give, and Inductor's code for a CPU's layers leaves out what
    their backward reads.
    """
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
    reason = "recurrent layers run as they are"
    return {layer: torch.compiler.disable(layer.forward, reason=reason) for layer in layers}


@contextlib.contextmanager
def untraced(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Keep Dynamo out of `optimizer.step()`: traced, it takes another path and gives other bits."""
    # A scheduler of learning rates may have replaced it, too.
    replaced = [optimizer.__dict__.get("step") for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.step = torch.compiler.disable(optimizer.step)
    try:
        yield
    finally:
        for optimizer, before in zip(optimizers, replaced, strict=True):
            del optimizer.__dict__["step"]
            if before is not None:
                optimizer.__dict__["step"] = before


@contextlib.contextmanager
def questions_noted(asked: list[str]) -> Iterator[None]:
    """Add to `asked` the names of functions by which code that Dynamo traces asks whether it is being traced.

    Dynamo answers them while it traces and keeps no record; its table of handlers is the only place that sees them.
    A module with hooks asks each time it is called, and computes the same either way.
    """
    handlers = TorchInGraphFunctionVariable._get_handlers()
    changed = {function: handlers[function] for function in _QUESTIONS if function in handlers}

    def noting(function: Any, handler: Any) -> Any:
        def handle(variable: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
            if translator.f_code.co_filename != nn.modules.module.__file__:
                asked.append(f"{function.__module__}.{function.__name__}")
            return handler(variable, translator, *args, **kwargs)

        return handle

    handlers.update({function: noting(function, handler) for function, handler in changed.items()})
    try:
        yield
    finally:
        handlers.update(changed)


@contextlib.contextmanager
def as_if_untraced() -> Iterator[None]:
    """Let code that asks be told that nothing traces it, although Dynamo is at work on the step around."""
    flag = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag


_QUESTIONS = (
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    torch.compiler.is_exporting,
    external_utils.is_compiling,
    torch._utils.is_compiling,
)
