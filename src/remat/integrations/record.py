"""What a training library is told of a plan: a line for its log, two numbers among its metrics, files beside its
checkpoints.

In: an optimized step. A plan may come with the first step or the third, and a new one with each input shape, so whoever
trains asks after each step whether there is something new.
"""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

from remat.core.budget import format_bytes
from remat.core.results.plan import Plan
from remat.errors import MissingExtra
from remat.pytorch.run.contract import StepSession
from remat.pytorch.run.optimize import session_of


class PlanRecord:
    """The latest plan of one training, and what has been told of it."""

    def __init__(self, folder: str | Path, *, writes: bool = True) -> None:
        self.plan: Plan | None = None
        self._folder = Path(folder) / "remat"
        self._writes = writes
        """One process of several writes files."""
        self._session: StepSession | None = None
        self._stored: Plan | None = None

    def follow(self, step: Any) -> None:
        """From now on the plan is that of this optimized step."""
        self._session = session_of(step)

    def let_go(self) -> None:
        """Keep the plan, and nothing of the step."""
        self._session = None

    def news(self) -> str:
        """After a step: a line where its plan says other things than the last one, and the first time files."""
        before, latest = self.plan, None if self._session is None else self._session.plan
        if latest is None or latest is before:
            return ""
        self.plan = latest
        if before is None:
            self.store()
        line = describe(latest)
        return line if before is None or line != describe(before) else ""

    def metrics(self) -> dict[str, float]:
        """Bytes at the predicted peak, and recomputation as a share of the plain step's time."""
        if self.plan is None:
            return {}
        return {"remat/peak": float(self.plan.predicted_peak), "remat/overhead": self.plan.overhead}

    def store(self) -> None:
        """Write `remat/plan.json` and, with the `report` extra, `remat/report.html` into the run's folder."""
        plan = self.plan
        if plan is None or plan is self._stored or not self._writes:
            return
        self._stored = plan
        try:
            self._write(plan)
        except OSError as error:
            warnings.warn(
                f"The plan cannot be stored in {self._folder} ({error}); training goes on without a copy of it.",
                stacklevel=2,
            )

    def _write(self, plan: Plan) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if plan.compiled is None:
            plan.save(self._folder / "plan.json")
        with contextlib.suppress(MissingExtra):
            plan.to_html(self._folder / "report.html")


def describe(plan: Plan) -> str:
    """Budget, predicted peak, overhead and gap in one line."""
    return (
        f"Remat: budget {format_bytes(plan.budget_bytes)}, predicted peak {format_bytes(plan.predicted_peak)}, "
        f"overhead {plan.overhead:.1%}, at most {plan.gap:.1%} from the fastest that fits"
    )
