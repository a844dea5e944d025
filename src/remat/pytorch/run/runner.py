"""Calls of a step that runs under a plan: what is new is captured and planned, and what cannot be runs as it is.

In: the user's step and what plans it. Out: its results.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from remat.core.garbage import collecting_rarely
from remat.distributed.agreement.members import agreement_for
from remat.errors import RematError
from remat.integrations.masks import masks_as_in_eager
from remat.pytorch._compat.checkpointed import run_checkpoints_as_eager
from remat.pytorch._compat.distributed import parallel_at_work
from remat.pytorch._compat.dynamo import (
    breaks_counted,
    dynamo_settings,
    failures_noted,
    forget_code,
    recapture_reason,
    untraced,
)
from remat.pytorch._compat.modes import inside_function_transform, planned_under_modes
from remat.pytorch.run.backend import SessionBackend
from remat.pytorch.run.called import root_function
from remat.pytorch.run.contract import StepSession
from remat.pytorch.run.shapes.buckets import Bound
from remat.pytorch.run.shapes.declared import declare, outside_bounds
from remat.pytorch.run.uncaptured import BeforeCall, UncapturedSteps, wants_gradients

FROM_NOW_ON = (
    " From its next call on it keeps to the budget as under remat.dtr: what autograd saves is given up where memory "
    "runs short, and computed again."
)
MANY_CAPTURES = 9
"""Captures of one step after which the user is told what changes."""


class _Weakly:
    """A backend for Dynamo, which keeps those it was given while the process runs: with all they hold of a model."""

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        backend = self._backend()
        if backend is None:
            run_checkpoints_as_eager(module)
            return module.forward
        return backend(module, inputs)


class Runner:
    """Calls the compiled step; the first calls capture and plan."""

    def __init__(self, step: Callable[..., Any], make: Callable[[str], SessionBackend]) -> None:
        self.__wrapped__ = step
        root = root_function(step)
        backend = make(root.__name__)
        self.session: StepSession = backend.session
        self._backend = backend
        self._compiled = torch.compile(root, backend=_Weakly(backend), dynamic=False)
        # Dynamo keeps what it compiled while the process runs, and with it the session.
        weakref.finalize(self, backend.session.owner.forget)
        weakref.finalize(self, forget_code, root.__code__)
        self._code = root.__code__
        self._has_peers = False
        """Whether it is known who trains together."""
        self._captures = 0
        """Calls in which something was captured."""
        self._turn = threading.RLock()
        self._uncaptured: UncapturedSteps | None = None
        """There where nothing of the step can be captured."""
        self._untraced = False
        """Whether something that the call under way runs could not be traced."""
        self._thread = 0
        """Which thread called last."""
        self._warned_of_threads = self._warned_of_transform = self._warned_of_bounds = False

    @functools.cached_property
    def _device(self) -> torch.device:
        return self.session.owner.device()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._is_transformed():
            return self.__wrapped__(*args, **kwargs)
        if self._uncaptured is not None:
            return self._uncaptured.run(self.__wrapped__, args, kwargs)
        if not self._turn.acquire(blocking=False):
            return self._call_unplanned(args, kwargs)
        try:
            if self._thread != threading.get_ident() and self.session.is_under_way():
                return self._call_unplanned(args, kwargs)
            self._thread = threading.get_ident()
            return self._call_planned(args, kwargs)
        finally:
            self._turn.release()

    def _is_transformed(self) -> bool:
        """Whether torch.func calls the step, on tensors that stand for others."""
        if not inside_function_transform():
            return False
        if not self._warned_of_transform:
            self._warned_of_transform = True
            warnings.warn(
                "This step is called inside a transform of torch.func (grad, vmap, …), so it runs unplanned there.",
                stacklevel=4,
            )
        return True

    def _call_unplanned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A plan is for one step at a time; another thread's runs as it would without Remat."""
        if not self._warned_of_threads:
            self._warned_of_threads = True
            warnings.warn(
                "This step is called while another thread is in the middle of it, so it runs unplanned, beyond the "
                "budget; let one thread run it at a time, or give each thread a model that is optimized for itself.",
                stacklevel=3,
            )
        return self.__wrapped__(*args, **kwargs)

    def _call_planned(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self._has_peers:
            self.session.agreement, self._has_peers = agreement_for(self.__wrapped__), True
            self.session.owner.meet_parallel(parallel_at_work())
        root = self.session.owner.root() if self.session.plan is None and self.session.agreement.ranks == 1 else None
        before = BeforeCall(root) if isinstance(root, nn.Module) else None
        self._untraced = False
        try:
            if self.session.graphs:
                return self._call_traced(args, kwargs)
            with self.session.agreement.attending(), collecting_rarely():
                return self._call_traced(args, kwargs)
        except Exception as error:
            if before is None or not self._untraced or isinstance(error, RematError) or not before.put_back():
                raise
            return self._call_as_written(error, args, kwargs)

    def _call_as_written(self, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Without Remat, where that does not fail as well."""
        try:
            result = self.__wrapped__(*args, **kwargs)
        except Exception:
            raise error from None
        budget = self.session.settings.budget
        self._uncaptured = UncapturedSteps(budget, self.session.owner) if budget is not None else None
        reason = str(error).strip().split("\n")[0]
        warnings.warn(
            f"This step fails where it is traced, and not as it is written ({type(error).__name__}: {reason}), so it "
            f"runs unplanned.{FROM_NOW_ON}",
            stacklevel=4,
        )
        return result

    def _call_traced(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.session.plan is None and self._device.type == "cpu":
            self.session.owner.beside.look()
        if bounds := self.session.settings.bounds:
            self._declare(bounds, args, kwargs)
        self.session.begin_call(args, kwargs)
        breaks, graphs = breaks_counted(), len(self.session.graphs)
        with (
            dynamo_settings(self._device, leaves_open=self._leaves_open()),
            masks_as_in_eager(),
            planned_under_modes(),
            untraced(self.session.owner.optimizers_of_step()),
            self._backend.called(self.__wrapped__, args, kwargs),
            failures_noted() as failed,
        ):
            try:
                result = self._compiled(*args, **kwargs)
            except BaseException as error:
                self.session.abandon_call()
                self.session.agreement.leave(error)
                if failed:
                    # Where it fails in eager too, tracing was not to blame: the next call is traced again.
                    forget_code(self._code)
                self._untraced = bool(failed)
                raise
        self.session.end_call()
        if not self.session.graphs:
            self.session.agreement.leave()
        self.session.left_out += len(failed)
        skipped = (reason for reason, count in breaks_counted().items() if count > breaks.get(reason, 0))
        self.session.note_skipped((*skipped, *failed))
        self._captures += self._captures == 0 or len(self.session.graphs) > graphs
        self._warn_of_captures(was_captured=len(self.session.graphs) > graphs, may_go_back=wants_gradients(result))
        return result

    def _declare(self, bounds: Sequence[Bound], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        declared = declare(bounds, args, kwargs, is_marked=self._leaves_open())
        self.session.settings = replace(self.session.settings, bounds=declared)
        if (wrong := outside_bounds(declared)) is None:
            return
        words = (
            f"This call has a {wrong.axis} of {wrong.size}, outside of the declared {wrong.least} to {wrong.most}; "
            "declare wider bounds in dynamic=, or change the batch."
        )
        if not self.session.graphs:
            raise RematError(words)
        if not self._warned_of_bounds:
            self._warned_of_bounds = True
            warnings.warn(words, stacklevel=5)

    def _leaves_open(self) -> bool:
        return self.session.settings.leaves_open

    def _warn_of_captures(self, *, was_captured: bool, may_go_back: bool) -> None:
        """Say once that nothing could be captured, or that the same is captured again and again."""
        if self._captures == 1 and not self.session.graphs:
            self._captures += 1
            budget = self.session.settings.budget
            # Ops of ops, such as `torch.cond`, cannot go back under a mode.
            if may_go_back and budget is not None and not self._backend.left_ops_of_ops:
                self._uncaptured = UncapturedSteps(budget, self.session.owner)
            if not self.session.left_out:
                warnings.warn(
                    "Nothing of this step could be captured, so it runs unplanned; TORCH_LOGS=graph_breaks tells why."
                    + (FROM_NOW_ON if self._uncaptured is not None else ""),
                    stacklevel=4,
                )
        elif self._captures == MANY_CAPTURES and was_captured:
            warnings.warn(
                f"This step was captured and planned {MANY_CAPTURES} times, and will be for every new shape or number: "
                f"{recapture_reason(self._code)}. Each time takes seconds; give batches one of a few shapes, and "
                "numbers that change as tensors.",
                stacklevel=4,
            )
