"""When a plan that was made is made again: others took memory or gave it back, or ops take another time; and when no
plan is made any more, because planning itself fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from remat.core.budget import format_bytes
from remat.errors import InvalidGraph, InvalidLayout, InvalidSchedule, RematError
from remat.pytorch.run.planning import Planned
from remat.pytorch.run.settings import Allowance
from remat.pytorch.run.shapes.known import KnowsShapes
from remat.pytorch.run.variants import Variant
from remat.pytorch.run.watching.drift import DriftWatch

FAULTS = (InvalidGraph, InvalidLayout, InvalidSchedule)
"""Of what Remat raises, what no user can bring about with a model and a budget."""
Found = TypeVar("Found")


class PlansAgain(KnowsShapes):
    """A session that follows what becomes of its plans."""

    drift: DriftWatch
    allowance: Allowance
    given_up: bool = False
    """Whether planning has failed, so that every step runs unplanned."""

    def or_give_up(self, find: Callable[[], Found]) -> Found | None:
        """What `find` finds; None where it fails for no reason of the user's: the training goes on without it."""
        if self.given_up:
            return None
        try:
            return find()
        except Exception as error:
            settings = self.settings
            ends_here = settings.stop_after_capture or settings.stop_after_plan or settings.plan is not None
            if ends_here or self.agreement.ranks > 1 or not _is_fault(error):
                raise
            self.given_up = True
            tell_of_fault(error)
            return None

    def plan_again_where_drifted(self, first: Variant, usable: Sequence[Planned]) -> None:
        """Where others have taken or left memory since, or ops take another time than they did."""
        items = [item for item in usable if item.key[0][0] == first.key] if self.settings.plan is None else []
        planned = next(iter(items), None)
        plan = planned.plan if planned is not None else None
        needed, budget = (plan.predicted_peak, plan.budget_bytes) if plan is not None else (0, 0)
        wanted = max(budget, self.allowance.latest_bytes)
        key = planned.key if planned is not None else None
        if self.drift.begin_step(first.captured.device, key, needed, wanted):
            tell_of_room(self.drift.left_bytes)
            self.forget_what_was_solved()
        elif plan is not None and plan.overhead > 0 and (factor := self.drift.drifted(key)) != 1:
            tell_of_drift(factor)
            self.graphs[first.key[0]].measure_again()
            self.forget_what_was_solved()

    def forget_what_was_solved(self) -> None:
        """What was seen of steps is still true of them."""
        self.planned.clear()
        self.drift.forget()
        self.transfer.background.forget()


def _is_fault(error: Exception) -> bool:
    if isinstance(error, RematError):
        return isinstance(error, FAULTS)
    return not isinstance(error, (torch.OutOfMemoryError, MemoryError, Warning))


def tell_of_fault(error: Exception) -> None:
    reason = next(iter(str(error).strip().splitlines()), "")
    warnings.warn(
        f"This step could not be planned ({type(error).__name__}: {reason}), so it runs unplanned from now on, beyond "
        "the budget; this is a fault of Remat's: please report it.",
        stacklevel=3,
    )


def tell_of_room(left_bytes: int | None) -> None:
    warnings.warn(
        "Others have given back the memory that they took: the next steps are planned for the whole budget again."
        if left_bytes is None
        else f"Others leave {format_bytes(left_bytes)} of the device, less than the budget: the next steps are planned "
        "for that.",
        stacklevel=3,
    )


def tell_of_drift(factor: float) -> None:
    warnings.warn(
        f"Steps take {factor:.2f} times as long as when they were planned: their ops are measured and planned again.",
        stacklevel=3,
    )
