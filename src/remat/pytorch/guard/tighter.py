"""Tighter plans for the optimized steps within a guarded one.

In: a step. Out: `Change`s in the order in which they are to be tried after memory ran out: a budget somewhat below the
peak, then the leanest plan that is known. A step that `remat.apply` gave its plan keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from remat.core.budget import Budget, BudgetUnit, format_bytes
from remat.pytorch._compat.tensors import compiled_call
from remat.pytorch.run.contract import StepSession
from remat.pytorch.run.runner import Runner

FIRST_SHARE = 0.8
"""Of the peak that ran out of memory, for the first tighter plan."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do differently, and a sentence for whoever trains."""

    words: str
    make: Callable[[], None]


def planned_sessions(step: Any, modules: Iterable[nn.Module]) -> list[StepSession]:
    """Of the optimized steps that a step is, or could call."""
    found = [getattr(step, "__remat__", step), *(compiled_call(module) for module in modules)]
    sessions = {id(runner.session): runner.session for runner in found if isinstance(runner, Runner)}
    return [session for session in sessions.values() if session.settings.plan is None]


def tighter_plans(sessions: Iterable[StepSession]) -> Iterator[Change]:
    """Some of the way down, then all of it, for steps that have a plan."""
    for session in sessions:
        plan = session.plan
        if plan is None:
            continue
        target = int(FIRST_SHARE * plan.predicted_peak)
        words = f"under a budget of {format_bytes(target)}, lowered from {format_bytes(plan.budget_bytes)}"
        yield Change(words, partial(session.set_budget, in_bytes(target)))
        # The planner refuses what nothing fits, and says what does.
        yield Change("under the leanest plan known", partial(session.set_budget, in_bytes(1)))


def in_bytes(count: int) -> Budget:
    return Budget(float(count), BudgetUnit.BYTES)
