"""Gradients as they were before a step, without a copy of them.

In: parameters. Out: `Gradients`, which puts them back after a step that failed. Where there was no gradient, or the
step dropped the one that was there, a weak reference is enough. Where backward has added to one in place, taking that
away again would not give the same bits; the sum stays as it is instead, and the next run's first additions to it are
thrown away: as many as have been made. So no gradient is counted twice, and none is copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from remat.pytorch._compat.tensors import version_of


class Accumulations:
    """Counts what autograd adds to one parameter's gradient, and swaps in a finished one when enough has been added."""

    __slots__ = ("__weakref__", "_finished", "_handle", "_node", "_parameter", "_skipped", "count")

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self.count = 0
        self._finished: torch.Tensor | None = None
        self._skipped = 0
        # A leaf's node lives as long as somebody holds it.
        self._node: Any = get_gradient_edge(parameter).node
        self._handle = self._node.register_hook(self._added)

    def begin(self, finished: torch.Tensor | None = None, skipped: int = 0) -> None:
        """Count from nothing; after `skipped` additions, which are thrown away, the gradient is `finished`."""
        self.count, self._finished, self._skipped = 0, finished, skipped

    def end(self) -> torch.Tensor | None:
        """The finished gradient, where fewer additions came than the run before made."""
        finished, self._finished = self._finished, None
        return finished

    def remove(self) -> None:
        self._handle.remove()

    def _added(self, *_: Any) -> None:
        self.count += 1
        if self._finished is not None and self.count == self._skipped:
            self._parameter.grad, self._finished = self._finished, None


class _Before:
    """One parameter's gradient before the step."""

    __slots__ = ("_held", "_reference", "accumulations", "parameter", "skipped", "version")

    def __init__(self, parameter: torch.Tensor, accumulations: Accumulations | None) -> None:
        gradient = parameter.grad
        self.parameter, self.accumulations = parameter, accumulations
        self.version = 0 if gradient is None else version_of(gradient)
        # Weakly: a step that begins by dropping its gradients has their memory to itself.
        self._reference = None if gradient is None else weakref.ref(gradient)
        self._held: torch.Tensor | None = None
        self.skipped = 0
        """Additions of failed runs that are part of the gradient by now."""

    @property
    def gradient(self) -> torch.Tensor | None:
        """None where there was none, or the step dropped it: a second run would drop it too."""
        return None if self._reference is None else self._reference()

    def added(self) -> int:
        gradient = self.gradient
        return 0 if gradient is None else version_of(gradient) - self.version

    def is_known(self) -> bool:
        """Whether every change of the gradient was one of autograd's additions."""
        count = 0 if self.accumulations is None else self.accumulations.count
        return self.added() in (0, self.skipped) or self.added() == count

    def restore(self) -> None:
        self.skipped = self.added()
        gradient = self.gradient
        self._held = gradient if self.skipped else None
        self.parameter.grad = None if self.skipped else gradient
        if self.accumulations is not None:
            self.accumulations.begin(self._held, self.skipped)

    def set_aside(self) -> None:
        self._held, self.parameter.grad = self.gradient, None
        if self.accumulations is not None:
            self.accumulations.begin()

    def put_together(self) -> None:
        gradient, new = self.gradient, self.parameter.grad
        if gradient is not None:
            self.parameter.grad = gradient if self.skipped or new is None else gradient.add_(new)

    def finish(self) -> None:
        self._held = None
        if self.accumulations is not None and (finished := self.accumulations.end()) is not None:
            self.parameter.grad = finished


class Gradients:
    """What the gradients of `parameters` are before a step."""

    def __init__(self, parameters: Iterable[torch.Tensor], counters: dict[int, Accumulations]) -> None:
        self._without = []
        self._before = []
        for parameter in parameters:
            if parameter.grad is None:
                self._without.append(parameter)
            else:
                self._before.append(_Before(parameter, _counter(parameter, counters)))

    def are_known(self) -> bool:
        """Whether `restore` can put everything back."""
        return all(item.is_known() for item in self._before)

    def restore(self) -> None:
        self._drop_new()
        for item in self._before:
            item.restore()

    def _drop_new(self) -> None:
        for parameter in self._without:
            parameter.grad = None

    def finish(self) -> None:
        """The step has come to its end: nothing is thrown away any more."""
        for item in self._before:
            item.finish()

    def set_aside(self) -> None:
        """Let the next backward begin without gradients; `put_together` brings these back."""
        self._drop_new()
        for item in self._before:
            item.set_aside()

    def put_together(self) -> None:
        """Add what was computed since `set_aside` to what there was, unless a failed run has done so."""
        for item in self._before:
            item.put_together()

    def were_complete(self) -> bool:
        """After a whole run since `set_aside`: whether failed runs added either nothing or all that a run adds."""
        return all(item.accumulations is None or item.skipped in (0, item.accumulations.count) for item in self._before)


def _counter(parameter: torch.Tensor, counters: dict[int, Accumulations]) -> Accumulations | None:
    """Only gradients that are there can be added to in place."""
    if not parameter.requires_grad:
        return None
    if id(parameter) not in counters:
        counters[id(parameter)] = Accumulations(parameter)
    counter = counters[id(parameter)]
    counter.begin()
    return counter
