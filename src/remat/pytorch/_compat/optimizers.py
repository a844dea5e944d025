"""How torch and its schedulers come between a caller and an optimizer's step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class of optimizers as it was written: it calls no hook, and does not switch gradients off."""
    return inspect.unwrap(kind.step)


def replace_step(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Make `optimizer` one of `kind`, whose step is called between the optimizer's hooks.

    A scheduler that was made before has put its own function in the place of the old step, to note that it was called;
    what it looks for is that function's mark, and the note.
    """
    kind.step._wrapped_by_lr_sched = True
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = kind
    optimizer._patch_step_function()


def note_step(optimizer: Optimizer) -> None:
    """Tell schedulers that the optimizer has stepped."""
    optimizer._opt_called = True
