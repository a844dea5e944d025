"""Which module an op belongs to: the one whose forward runs, and in backward the one whose forward made the node.

Module calls come from torch's global forward hooks. An autograd node gets its number when forward makes it, so the
numbers that appear while a module runs are that module's; the engine says which node it evaluates. Modules are named
as in `model.named_modules()`; a model nobody spoke of gets its names when it is first called.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from remat.pytorch._compat.engine import next_node_number, running_node
from remat.pytorch._compat.tensors import sequence_number


class ModulePaths:
    """Where the step is now. `here` is asked once for every op, in the thread that runs it."""

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        self._models: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._owners: dict[int, tuple[str, str]] = {}
        self._stack: list[str] = []
        self._base = [0]
        self._made: dict[int, str] = {}
        self._made_elsewhere: dict[int, str] = {}
        self._next: dict[int, int] = {}
        self._home = threading.get_ident()
        self._last_backward = ""
        self._failure: tuple[int, str] | None = None
        """The identity of what a module raised last: itself, it would keep alive all that was at hand, and
        checkpointed regions end their second run with one."""
        self.leaves: dict[int, torch.Tensor] = {}
        """Tensors whose gradient backward accumulates, by identity."""
        self._on_call: Callable[[], None] = lambda: None
        found = _outermost(models)
        for model in found:
            self._add(model, type(model).__name__ if len(found) > 1 else "")

    def watch(self, on_call: Callable[[], None], entered: nn.Module | None = None) -> list[Any]:
        """Begin; `on_call` is called with every module. Returns the hooks to remove in the end."""
        self._home = threading.get_ident()
        self._next = {self._home: next_node_number()}
        self._on_call = on_call
        if entered is not None:
            self._entered(entered, ())
        return [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]

    def models(self) -> list[nn.Module]:
        return list(self._models)

    def modules(self) -> Iterator[tuple[nn.Module, str]]:
        """Every module known, with its name."""
        yield from self._names.items()

    def owner(self, parameter: torch.Tensor) -> tuple[str, str]:
        """The module that holds a parameter and the parameter's own name; no names for one that nobody holds."""
        return self._owners.get(id(parameter), ("", "a parameter"))

    def is_inside(self) -> bool:
        """Whether a module's forward is running."""
        return len(self._stack) > self._base[-1]

    def note_nodes(self) -> bool:
        """Give the nodes made since the last call to the module that runs; False where there are none."""
        thread, number = threading.get_ident(), next_node_number()
        first = self._next.get(thread, number)
        self._next[thread] = number
        # Numbers count up in each thread for itself; the engine's threads start anew.
        made = self._made if thread == self._home else self._made_elsewhere
        here = self._top()
        for node in range(first, number):
            made[node] = here
        return number > first

    def in_forward(self) -> str:
        return self._top()

    def in_backward(self) -> str:
        """The module of the node that the engine evaluates; sums of gradients belong to the node before them."""
        if self.is_inside():
            # A checkpointed region runs its forward again.
            return self._top()
        node = running_node()
        if node is not None:
            self._last_backward = self._of_node(node)
        return self._last_backward

    def engine_began(self) -> None:
        self._base.append(len(self._stack))

    def engine_returned(self) -> None:
        self._base.pop()

    def raised_in(self, error: BaseException) -> str | None:
        """The innermost module that `error` left; None where it came from outside of modules."""
        return self._failure[1] if self._failure is not None and self._failure[0] == id(error) else None

    def _of_node(self, node: Any) -> str:
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            self.leaves[id(variable)] = variable
            return self._owners.get(id(variable), (self._last_backward, ""))[0]
        number = sequence_number(node)
        if len(self._base) > 2 and number in self._made_elsewhere:
            return self._made_elsewhere[number]
        return self._made.get(number, self._last_backward)

    def _top(self) -> str:
        return self._stack[-1] if self.is_inside() else ""

    def _entered(self, module: nn.Module, _: Any) -> None:
        self.note_nodes()
        self._on_call()
        if module not in self._names:
            self._add(module, self._name_stranger(module))
        self._stack.append(self._names[module])

    def _left(self, module: nn.Module, _: Any, __: Any) -> None:
        self.note_nodes()
        error = sys.exc_info()[1]
        if error is not None and (self._failure is None or self._failure[0] != id(error)):
            self._failure = (id(error), self._stack[-1])
        self._stack.pop()

    def _name_stranger(self, module: nn.Module) -> str:
        """A module that no known model contains: a part made on the fly, or one more model."""
        kind = type(module).__name__
        if self.is_inside():
            return f"{self._top()}.{kind}".lstrip(".")
        return kind if self._names else ""

    def _add(self, model: nn.Module, prefix: str) -> None:
        if not self.is_inside():
            self._models.append(model)
        for name, module in model.named_modules():
            path = ".".join(part for part in (prefix, name) if part)
            self._names.setdefault(module, path)
            for short, parameter in module.named_parameters(recurse=False):
                full = f"{self._names[module]}.{short}".lstrip(".")
                self._owners.setdefault(id(parameter), (self._names[module], full))


def _outermost(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Without those that are part of another."""
    distinct = list(dict.fromkeys(models))
    parts = {part for model in distinct for part in model.modules() if part is not model}
    return [model for model in distinct if model not in parts]
