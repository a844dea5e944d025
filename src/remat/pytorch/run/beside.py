"""Models that the training loop runs beside the step without going back through them: a teacher, a moving average.

The CUDA allocator tells what they hold; on a CPU nobody does, and nothing leads from the step to them. So calls of
modules are looked at between the calls of the step, until it is planned.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModelsBeside:
    """Notes the models that are called without gradients while it looks; it keeps none of them alive."""

    def __init__(self) -> None:
        self._noted: dict[int, weakref.ref[nn.Module]] = {}
        self._depth = 0
        """How many calls of modules are under way: only the outermost is a model."""
        self._hooks: tuple[Any, ...] = ()

    def look(self) -> None:
        """Note models that are called from here on."""
        if not self._hooks:
            self._depth = 0
            self._hooks = (
                register_module_forward_pre_hook(self._began),
                register_module_forward_hook(self._ended, always_call=True),
            )

    def look_away(self) -> None:
        """The step itself runs, or nobody will ask any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def models(self) -> list[nn.Module]:
        """Those that are still alive."""
        return [module for reference in self._noted.values() if (module := reference()) is not None]

    def _began(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth == 1 and not (torch.is_grad_enabled() and _is_trained(module)):
            self._noted[id(module)] = weakref.ref(module)

    def _ended(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth = max(0, self._depth - 1)


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
