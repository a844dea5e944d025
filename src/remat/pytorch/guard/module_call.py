"""One guarded call of a module: forward now, and backward when autograd asks for it.

In: a function that runs forward, and its arguments. Out: its results, which hang on one node of autograd's. That node's
backward runs the module's own inside; where memory runs out in it, gradients are put back as they were when it began,
forward runs again from the generators and buffers that it had, and backward follows. In parts of the batch, forward
runs without gradients at first, and once more for each part in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from remat.errors import RematError
from remat.pytorch._compat.engine import keeps_graph
from remat.pytorch._compat.trees import tree_leaves, tree_map
from remat.pytorch.guard.climb import Climb
from remat.pytorch.guard.parts import Batch, CannotSplit, Reduction, cut_value, put_together, run_in_parts, spans
from remat.pytorch.guard.rollback import Before, StepFacts

DEVICE_TYPES = ("cpu", "cuda")

Incoming = tuple[torch.Tensor | None, ...]
"""Gradients of the results."""


class ModuleCall:
    """A forward that has run, and the backward that is still to come."""

    def __init__(self, call: Callable[..., Any], batch: Batch, facts: StepFacts, climb: Climb) -> None:
        self._call, self._facts, self._climb = call, facts, climb
        given = [item for item in _tensors((list(batch.args), dict(batch.kwargs))) if item.requires_grad]
        self._batch = Batch(*tree_map(_cut_off, (list(batch.args), dict(batch.kwargs)))) if given else batch
        self._given = given
        self._results: list[torch.Tensor] = []
        """With the module's own graph behind them; empty where forward has to run again before backward."""
        self._autocast = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False)
            for kind in DEVICE_TYPES
            if torch.is_autocast_enabled(kind)
        ]

    def run(self) -> Any:
        before = self._facts.before(self._leaves(), {})
        self._generators, self._buffers, self._versions = before.generators, before.buffers, self._facts.versions()
        result = self._climb.run(self._forward, self._try, self._batch, before)
        del before
        outputs = _floating(result)
        if not outputs or not (self._given or self._facts.needs_gradients()):
            return result
        joined = _Joined.apply(self, outputs, bool(self._results), self._facts.anchor, *self._given)
        by_output = dict(zip(map(id, outputs), joined, strict=True))
        return tree_map(lambda item: by_output.get(id(item), item), result)

    def _leaves(self) -> list[torch.Tensor]:
        """Where backward inside ends, in the order of what was given."""
        if not self._given:
            return []
        return [item for item in _tensors((self._batch.args, self._batch.kwargs)) if item.requires_grad]

    def _forward(self, count: int) -> Any:
        self._results = []
        if count > 1:
            return self._forward_in_parts(count)
        result = self._call(*self._batch.args, **self._batch.kwargs)
        self._results = _floating(result)
        return result

    def _forward_in_parts(self, count: int) -> Any:
        size, found = self._batch.size, []
        for span in spans(size, count):
            part = self._batch.cut(*span)
            with torch.no_grad():
                found.append(self._call(*part.args, **part.kwargs))
        return put_together(found, [stop - start for start, stop in spans(size, count)], self._climb.split_by())

    def _try(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Forward and backward with ones in place of the gradients that are to come: of losses, where there are any."""
        with self._as_in_forward():
            results = _floating(self._call(*args, **kwargs))
        has_loss = any(not item.dim() for item in results)
        ones = tuple(None if item.dim() and has_loss else torch.ones_like(item) for item in results)
        _run_backward(results, ones, keep=False)

    def backward(self, incoming: Incoming) -> list[torch.Tensor | None]:
        """Gradients of what the module was given; those of its parameters are accumulated."""
        leaves = self._leaves()
        before = self._facts.before(leaves, {}, is_backward=True)
        keep = keeps_graph()

        def attempt(count: int) -> None:
            if count == 1:
                self._backward(incoming, keep=keep)
            else:
                self._backward_in_parts(incoming, count, before)

        self._climb.run(attempt, self._try, self._batch, before)
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    def _backward(self, incoming: Incoming, *, keep: bool) -> None:
        # Taken away at once: where this fails, forward has to run again.
        results, self._results = self._results, []
        if not results:
            results = self._replay(lambda: _floating(self._call(*self._batch.args, **self._batch.kwargs)))
        _run_backward(results, incoming, keep=keep)
        if keep:
            self._results = results

    def _backward_in_parts(self, incoming: Incoming, count: int, before: Before) -> None:
        self._results = []
        ends = iter(list(spans(self._batch.size, count)))
        reduction = self._reduction_of(incoming)

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            start, stop = next(ends)
            with self._as_in_forward():
                results = _floating(self._call(*args, **kwargs))
            _run_backward(results, cut_value(incoming, start, stop, self._batch.size), keep=False)

        self._replay(lambda: run_in_parts(run, self._batch, count, before, reduction))

    def _reduction_of(self, incoming: Incoming) -> Reduction:
        """How gradients of parts add up: those of a loss as it does, those of each sample's results as they are."""
        are_losses = {not item.dim() for item in incoming if item is not None}
        if len(are_losses) > 1:
            raise CannotSplit("gradients reach its loss and its samples' results at once; use one of them")
        return self._climb.split_by() if True in are_losses else Reduction.SUM

    def _replay(self, run: Callable[[], Any]) -> Any:
        """Run what begins with forward from the generators and buffers that it began with, and leave these as now."""
        if self._facts.versions() != self._versions or not self._buffers.are_known():
            raise RematError(
                "A module ran out of memory in backward and cannot run its forward again, because parameters or "
                "buffers have changed since; call backward before the optimizer steps."
            )
        now = self._facts.buffers()
        self._buffers.restore()
        try:
            with self._as_in_forward():
                return self._generators.replay(run)
        finally:
            now.restore()

    @contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """With gradients and in the types that forward was called in."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for autocast in self._autocast:
                stack.enter_context(autocast)
            yield


class _Joined(torch.autograd.Function):
    """Between a module's own graph and the caller's."""

    @staticmethod
    def forward(
        ctx: Any,
        call: ModuleCall,
        outputs: Sequence[torch.Tensor],
        has_graph: bool,
        anchor: torch.Tensor,
        *given: torch.Tensor,
    ) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        joined = tuple(item.detach() for item in outputs)
        constant = (item for item, output in zip(joined, outputs, strict=True) if not output.requires_grad)
        if has_graph:
            ctx.mark_non_differentiable(*constant)
        return joined

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        return None, None, None, None, *ctx.call.backward(incoming)


def _run_backward(results: Sequence[torch.Tensor], incoming: Incoming, *, keep: bool) -> None:
    found = zip(results, incoming, strict=True)
    pairs = [(item, gradient) for item, gradient in found if gradient is not None and item.requires_grad]
    torch.autograd.backward([item for item, _ in pairs], [gradient for _, gradient in pairs], retain_graph=keep)


def _floating(value: Any) -> list[torch.Tensor]:
    """The results that can have gradients."""
    return [item for item in _tensors(value) if item.is_floating_point() or item.is_complex()]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


def _cut_off(item: Any) -> Any:
    """A leaf in place of a tensor that the caller wants a gradient of: backward inside ends there."""
    return item.detach().requires_grad_() if isinstance(item, torch.Tensor) and item.requires_grad else item
