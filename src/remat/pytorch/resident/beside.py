"""Models that the training loop runs beside the step without going back through them: a teacher, a moving average.

The CUDA allocator tells what they hold; on a CPU nobody does, and nothing leads from the step to them. So calls of
modules are looked at between the calls of steps, until these are planned. One pair of hooks serves all who look: they
are gone while a step is traced, and what collects garbage never takes them away, which may be amid a trace.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModelsBeside:
    """Notes the models that are called without gradients while it looks; it keeps none of them alive."""

    def __init__(self) -> None:
        self._noted: dict[int, weakref.ref[nn.Module]] = {}

    def look(self) -> None:
        """Note models that are called from here on."""
        _hooks.watchers.add(self)
        _hooks.hang()

    def look_away(self) -> None:
        """Nobody will ask any more."""
        _hooks.watchers.discard(self)

    def note(self, model: nn.Module) -> None:
        """A model is called."""
        self._noted[id(model)] = weakref.ref(model)

    def models(self) -> list[nn.Module]:
        """Those that are still alive."""
        return [module for reference in self._noted.values() if (module := reference()) is not None]


@contextmanager
def nobody_looks() -> Iterator[None]:
    """A step runs, and may be traced: what it calls is its own."""
    _hooks.take_down()
    try:
        yield
    finally:
        if _hooks.watchers:
            _hooks.hang()


class _Hooks:
    """What torch calls with every module."""

    def __init__(self) -> None:
        self.watchers: weakref.WeakSet[ModelsBeside] = weakref.WeakSet()
        self._handles: tuple[Any, ...] = ()
        self._depth = 0
        """How many calls of modules are under way: only the outermost is a model."""

    def hang(self) -> None:
        if not self._handles:
            self._depth = 0
            self._handles = (
                register_module_forward_pre_hook(self._began),
                register_module_forward_hook(self._ended, always_call=True),
            )

    def take_down(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def _began(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self.watchers:
            self.take_down()
        self._depth += 1
        if self._depth == 1 and not (torch.is_grad_enabled() and _is_trained(module)):
            for watcher in list(self.watchers):
                watcher.note(module)

    def _ended(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)


_hooks = _Hooks()


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
