"""Autograd's engine: when it runs, whether it keeps graphs, and the node at work."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import autograd
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import _engine_run_backward


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


# A step that Dynamo has broken off runs under its eyes, and all that it calls: it would trace the solvers.
@torch.compiler.disable
def _run_backward(*args: Any, **kwargs: Any) -> Any:
    for watcher in list(_engine_watchers):
        watcher.engine_began()
    try:
        return _engine_run_backward(*args, **kwargs)
    finally:
        for watcher in list(_engine_watchers):
            watcher.engine_returned()


def is_called_by_engine() -> bool:
    """Whether the op that is being dispatched comes from autograd's own code, not from Python that it runs."""
    frame: Any = sys._getframe(1)
    while frame is not None and _passes_ops_on(frame.f_code):
        frame = frame.f_back
    # The engine's threads for other devices have no frame of their own.
    return frame is None or frame.f_code is _engine_run_backward.__code__


def _passes_ops_on(code: Any) -> bool:
    between = ("torch/_dynamo/eval_frame.py", "torch/_compile.py", "torch/_ops.py")
    return code.co_name == "__torch_dispatch__" or code.co_filename.endswith(between)


def keeps_graph() -> bool:
    """Whether the backward pass now running was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def next_node_number() -> int:
    """The sequence number that the next autograd node made in this thread will get."""
    return int(_get_sequence_nr())


def running_node() -> Any:
    """The autograd node that the engine is evaluating in this thread; None outside backward."""
    return torch._C._current_autograd_node()
