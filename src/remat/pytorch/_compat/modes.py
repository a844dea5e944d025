"""Dispatch modes: the user's, put aside or planned around."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo import config as dynamo_config
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from remat.pytorch._compat.replaced import settings_changed

DispatchMode = TorchDispatchMode


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
