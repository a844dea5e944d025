"""`guarded`: a training step for which running out of memory is an event, not the end.

In: a function that runs forward and backward, or a module, optimized or not. Out: the same, which rolls a failed run
back and runs it again with less memory. Of a module, forward and backward are both guarded: its result hangs on one
node of autograd's, whose backward runs the module's own, and the module once more where that fails.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.errors import RematError
from remat.pytorch._compat.tensors import compiled_call, plain_call, replace_call
from remat.pytorch.guard.climb import Climb, is_distributed
from remat.pytorch.guard.module_call import ModuleCall
from remat.pytorch.guard.parts import Batch, Reduction, parse_reduction, run_in_parts
from remat.pytorch.guard.rollback import Before, StepFacts
from remat.pytorch.guard.tighter import planned_sessions


class Guard:
    """Calls a step, and runs it again where memory ran out."""

    def __init__(self, step: Any, call: Any, reduction: Reduction | None, *, split: bool, is_forward: bool) -> None:
        self._step, self._call, self._is_forward = step, call, is_forward
        self._facts: StepFacts | None = None
        self._climb = Climb(self._sessions, reduction, may_split=split)
        self._warned_of_others = False
        runner = getattr(step, "__remat__", call)
        self.__remat__ = runner
        functools.update_wrapper(self, call, updated=())

    @property
    def failures(self) -> int:
        """Runs that were rolled back so far."""
        return self._climb.failures

    @property
    def changes(self) -> tuple[str, ...]:
        """What has been changed since the first run, each once."""
        return tuple(self._climb.changes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or self._is_one_of_several():
            return self._call(*args, **kwargs)
        facts = self._facts
        if facts is None:
            facts = self._facts = StepFacts(self._step)
        batch = Batch(args, kwargs)
        if self._is_forward:
            return ModuleCall(self._call, batch, facts, self._climb).run()
        before = facts.before(args, kwargs)
        return self._climb.run(lambda count: self._run_parts(batch, count, before), self._run, batch, before)

    def _run_parts(self, batch: Batch, count: int, before: Before) -> Any:
        if count == 1:
            return self._call(*batch.args, **batch.kwargs)
        return run_in_parts(self._run, batch, count, before, self._climb.split_by())

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._call(*args, **kwargs)

    def _sessions(self) -> list[Any]:
        return planned_sessions(self.__remat__, self._facts.modules() if self._facts is not None else ())

    def _is_one_of_several(self) -> bool:
        if not is_distributed():
            return False
        if not self._warned_of_others:
            self._warned_of_others = True
            warnings.warn(
                "This process trains together with others, which would wait while it runs a step again; the step is "
                "not guarded.",
                stacklevel=3,
            )
        return True


def guarded(step: Any, *, split: bool = True, reduction: str | None = None) -> Any:
    """The same step, rolled back and run again with less where memory runs out.

    `step` is a function that runs forward and backward (leave the optimizer to after it), or a module; it may be what
    `remat.optimize` returned. `split` allows parts of the batch, which is dimension 0 of tensors among the arguments.
    Whether the loss is the "mean" or the "sum" over the batch is found out, unless `reduction` says so.
    """
    if not callable(step):
        raise RematError(f"A step that can be guarded is a function or a module, not a {type(step).__name__}.")
    kind = parse_reduction(reduction)
    if not isinstance(step, nn.Module):
        return Guard(step, step, kind, split=split, is_forward=False)
    copied = copy.copy(step)
    call = compiled_call(step) or plain_call(copied)
    replace_call(copied, Guard(copied, call, kind, split=split, is_forward=True))
    return copied


def guarded_call(step: Any, *, split: bool = True) -> Guard:
    """A function that runs forward alone, of a training library that calls backward itself."""
    return Guard(step, step, None, split=split, is_forward=True)


def guard_of(step: Any) -> Guard:
    """What guards a step: how often it failed, and what was changed for it."""
    guard = compiled_call(step) if isinstance(step, nn.Module) else step
    if not isinstance(guard, Guard):
        raise RematError("This step is not guarded; pass what remat.guarded returned.")
    return guard
