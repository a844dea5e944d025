"""Dispatch modes: ours, and the user's, put aside or planned around."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch._C import DispatchKey
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import config as dynamo_config
from torch._ops import HigherOrderOperator
from torch.nn.attention import flex_attention
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from remat.pytorch._compat.replaced import replaced, settings_changed

_SEEN_WITHIN = ("flex_attention", "flex_attention_backward")
"""Others, such as `torch.cond`, refuse to run under a mode."""


class DispatchMode(TorchDispatchMode):
    """One that is asked for ops of ops, such as FlexAttention, too, which torch would refuse to run under it."""

    supports_higher_order_operators = True

    def __enter__(self) -> Self:
        super().__enter__()
        self._entered.append(contextlib.ExitStack())
        # It has itself traced by Dynamo, which falls back to plain eager under a mode, and then refuses that.
        self._entered[-1].enter_context(replaced(flex_attention, "setup_compilation_env", _traced_under_modes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().close()
        super().__exit__(*error)

    @functools.cached_property
    def _entered(self) -> list[contextlib.ExitStack]:
        """Once for each time that the mode was entered and not left."""
        return []

    def run_within(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """Run an op of ops as eager does: the mode sees the ops that attention is made of; others run unseen."""
        if func.name() not in _SEEN_WITHIN:
            return func(*args, **kwargs)
        with self:
            return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)


def _traced_under_modes(environment: Callable[[], Any]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def setup_for_dynamo() -> Iterator[Any]:
        with planned_under_modes(), environment() as backend:
            yield backend

    return setup_for_dynamo


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Compile as if no TorchDispatchMode of the user's were active; it will see the ops when they run."""
    with _disable_current_modes():
        yield


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Run ops in the types they are given: those of a captured graph have been cast, and planning may happen inside the
    user's `torch.autocast`.
    """
    disabled: contextlib.AbstractContextManager[None] = torch._C._DisableAutocast()
    return disabled


def modes_active() -> bool:
    """Whether a TorchDispatchMode is active in this thread."""
    return bool(python_dispatch._get_current_dispatch_mode_stack())


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
    off = {asks_stack: False} if hasattr(dynamo_config, asks_stack) else {}
    _set_in_mode(False)
    try:
        with settings_changed(dynamo_config, **off):
            yield
    finally:
        _set_in_mode(True)


def _set_in_mode(value: bool) -> None:
    python_dispatch._is_in_any_mode_without_ignore_compile_internals = value
    set_is_in_mode_without_ignore_compile_internals(value)


def inside_function_transform() -> bool:
    """Whether `torch.func.grad`, `vmap` or another transform of a function is at work."""
    return peek_interpreter_stack() is not None
