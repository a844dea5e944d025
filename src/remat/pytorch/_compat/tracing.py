"""What tracing does otherwise than eager, put right: decompositions, casts, numbers, custom backwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import autograd
from torch._C import DispatchKey
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import collect_metadata_analysis as metadata_analysis
from torch._functorch._aot_autograd import graph_compile
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import proxy_tensor

from remat.pytorch._compat.cudnn_norm import eager_cudnn_batch_norm
from remat.pytorch._compat.fakes import true_sizes_of_fused_layers
from remat.pytorch._compat.replaced import replaced, settings_changed
from remat.pytorch.ops import define_custom_backward, eager_dropout

_TRACED_ALIKE = frozenset(
    f"aten.{name}"
    for name in (
        *("one_hot.default", "tensor_split.tensor_indices_or_sections", "broadcast_tensors.default", "empty.out"),
        *("unsafe_chunk.default", "pad_sequence.default", "istft.default"),
        "native_batch_norm.default",
    )
)
"""Ops whose Python versions compute what eager does, and whose C++ versions would look at data while tracing."""


_FAITHFUL = {
    torch.ops.aten.dropout.default: eager_dropout,
    torch.ops.aten.cudnn_batch_norm.default: eager_cudnn_batch_norm,
}
"""Versions of ours, which give eager's bits, while tracing."""
_PYTHON_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@functools.cache
def _traced_differently() -> tuple[Any, ...]:
    """Ops that have a Python version for tracing in place of what eager runs."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if any(key in op.py_kernels for key in _PYTHON_KEYS) and str(op) not in _TRACED_ALIKE:
                found.append(op)
    return tuple(found)


@contextlib.contextmanager
def _casts_cached() -> Iterator[None]:
    """Let autocast keep the cast of a parameter for its next use, as in eager, where its gradients are then added
    before they are cast back. Tracing turns that off for fear of casts that outlive it; here they do not.
    """
    original = proxy_tensor.disable_autocast_cache
    places = [place for place in (proxy_tensor, metadata_analysis) if hasattr(place, "disable_autocast_cache")]
    torch.clear_autocast_cache()
    for place in places:
        place.disable_autocast_cache = _clear_casts_around
    try:
        yield
    finally:
        for place in places:
            place.disable_autocast_cache = original


def _numbers_kept(tensorify: Any) -> Any:
    """Leave numbers that change what they are: AOTAutograd would make tensors of them, which round otherwise, or start
    over with constants in their place.
    """

    def left(*_: Any) -> None: ...

    return left


@contextlib.contextmanager
def _clear_casts_around() -> Iterator[None]:
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def eager_kernels_while_tracing() -> Iterator[None]:
    """Trace ops as eager PyTorch computes them.

    While tracing, torch replaces some ops by Python versions that differ from eager in bits and memory: `dropout` by
    `native_dropout`, which eager uses on CUDA only, recurrent layers by loops of small ops, some losses, shrinking
    activations and resizing of images by what they are made of. For the time of the trace, dropout gets a faithful
    version and the others are left to their kernels and C++ composites, as in eager. Fused recurrent layers, whose fake
    versions get sizes and strides wrong, are asked for them by a run on zeros.
    """
    numbers_kept = replaced(graph_compile, "tensorify_python_scalars", _numbers_kept)
    # Random numbers that nobody reads are drawn, too: those that follow depend on it.
    unread_kept = settings_changed(inductor_config, fallback_random=True)
    with _python_versions_taken_away(), true_sizes_of_fused_layers(), _casts_cached(), numbers_kept, unread_kept:
        yield


@contextlib.contextmanager
def _python_versions_taken_away() -> Iterator[None]:
    keys, changed = _PYTHON_KEYS, _traced_differently()
    taken = {op: {key: op.py_kernels.pop(key) for key in keys if key in op.py_kernels} for op in changed}
    for op, kernel in _FAITHFUL.items():
        op.py_kernels.update(dict.fromkeys(keys, kernel))
    try:
        for op in changed:
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key in itertools.product(_FAITHFUL, keys):
            op.py_kernels.pop(key)
        for op, kernels in taken.items():
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


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


def lazy_module(root: Any, graph: Graph) -> GraphModule:
    """A module whose code is written only if it is called: that of a hundred thousand nodes takes a while."""
    return _LazyGraphModule(root, graph)


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
    inputs = ctx.remat_inputs
    if not all(isinstance(item, torch.Tensor) for item in (*inputs, *grads)):
        return backward(ctx, *grads)
    try:
        with _data_unread():
            return backward(ctx, *grads)
    except DataDependentOutputException:
        found = iter(torch.ops.remat.custom_backward(name, list(inputs), list(grads)))
        return tuple(next(found) if item.is_floating_point() else None for item in inputs)


@contextlib.contextmanager
def _data_unread() -> Iterator[None]:
    """Tracing for Inductor fails too where data is read: it would go on with a symbol, and fail at a branch on that."""
    mode = detect_fake_mode()
    if mode is None or mode.shape_env is None:
        yield
        return
    unread = dataclasses.replace(mode.shape_env.settings, allow_scalar_outputs=False)
    with settings_changed(mode.shape_env, settings=unread):
        yield


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
    return settings_changed(functorch_config, backward_pass_autocast="off")


def many_results_compiled() -> contextlib.AbstractContextManager[None]:
    """Let a step write to thousands of buffers: AOTAutograd writes one sum of lists for all its results that have no
    gradient, nested as deep as there are results, and Python refuses to compile that.
    """
    # torch 2.11 writes no such code.
    if find_spec(_SOURCES) is None:
        return contextlib.nullcontext()

    def in_one_list(compile_source: Any) -> Any:
        def compiled(source: str, *args: Any, **options: Any) -> Any:
            return compile_source(_SUM_OF_LISTS.sub(_one_list, source), *args, **options)

        return compiled

    return replaced(import_module(_SOURCES), "_compile_and_exec_source", in_one_list)


_SOURCES = "torch._functorch._aot_autograd.subclass_codegen"
_SUM_OF_LISTS = re.compile(
    r"(?<= non_diff = )\(\[raw_returns\[\d+\]\] if isinstance\(raw_returns\[\d+\], Tensor\) else \[\]\) \+ .*"
)


def _one_list(found: re.Match[str]) -> str:
    places = ", ".join(re.findall(r"\[raw_returns\[(\d+)\]\]", found.group()))
    return f"[raw_returns[i] for i in ({places}) if isinstance(raw_returns[i], Tensor)]"


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


define_custom_backward(custom_backward)
