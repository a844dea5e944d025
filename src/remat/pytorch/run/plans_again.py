"""When a plan that was made is made again: others took memory or gave it back, or ops take another time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from remat.core.budget import format_bytes
from remat.pytorch.run.planning import Planned
from remat.pytorch.run.settings import Allowance
from remat.pytorch.run.shapes.known import KnowsShapes
from remat.pytorch.run.variants import Variant
from remat.pytorch.run.watching.drift import DriftWatch


class PlansAgain(KnowsShapes):
    """A session that follows what becomes of its plans."""

    drift: DriftWatch
    allowance: Allowance

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
