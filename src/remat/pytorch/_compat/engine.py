"""Autograd's engine: when it runs, whether it keeps graphs, and the node at work."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import autograd
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

COMPILED_NODE = "CompiledFunctionBackward"
"""What the autograd nodes are called that AOTAutograd makes, one for each call of a graph."""


class EngineWatcher(Protocol):
    """Is told, in the user's thread, when the autograd engine is called and when it is back."""

    def engine_began(self, roots: Sequence[torch.Tensor]) -> None:
        """A backward from `roots` begins."""

    def engine_returned(self) -> None: ...


_engine_watchers: list[EngineWatcher] = []
"""Several steps can be watched at once on CUDA."""


def watch_engine(watcher: EngineWatcher) -> None:
    """No public hook tells when `backward` and `grad` hand over to the engine; both call it by this name."""
    if watcher not in _engine_watchers:
        _engine_watchers.append(watcher)
    autograd._engine_run_backward = _run_backward


def unwatch_engine(watcher: EngineWatcher) -> None:
    _engine_watchers.remove(watcher)
    if not _engine_watchers:
        autograd._engine_run_backward = _engine_run_backward


# A step that Dynamo has broken off runs under its eyes, and all that it calls: it would trace the solvers.
@torch.compiler.disable
def _run_backward(roots: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    for watcher in list(_engine_watchers):
        watcher.engine_began(roots)
    try:
        return _engine_run_backward(roots, *args, **kwargs)
    finally:
        for watcher in list(_engine_watchers):
            watcher.engine_returned()


def saved_for(roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What autograd's own functions keep for the backward from `roots`: Python's keep to themselves what they saved."""
    for node in _nodes_behind(roots):
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from _saved_as(node, name)


def leaf_uses(roots: Sequence[torch.Tensor]) -> Counter[int]:
    """How many gradients the backward from `roots` has for each leaf, by the leaf's identity."""
    following = (item for node in _nodes_behind(roots) for item, _ in node.next_functions)
    return Counter(id(item.variable) for item in following if hasattr(item, "variable"))


def accumulates(leaf: torch.Tensor) -> bool:
    """Whether the backward under way will add to the gradient of `leaf`, which `autograd.grad` does not."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:
        return False


def _nodes_behind(roots: Sequence[torch.Tensor]) -> Iterator[Any]:
    waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
    met = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        yield node


def _saved_as(node: Any, name: str) -> Iterator[torch.Tensor]:
    try:
        value = getattr(node, name)
    except RuntimeError:
        # Freed, or changed since: backward itself will say so.
        return
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


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


def in_backward() -> bool:
    """Whether the engine is at work in this thread."""
    return int(torch._C._current_graph_task_id()) != -1
