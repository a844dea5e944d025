"""What works and what does not in a step under a budget, with what to do about each thing.

A `Diagnosis` is what `remat.doctor` returns and what `remat doctor TARGET` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FindingKind(Enum):
    """What a finding is about."""

    NOT_TRACED = "not traced"
    """Lines, or functions, that torch.compile cannot follow; they run as before."""
    LEFT_OUT = "left out"
    """Traced, but not planned: it runs as before."""
    BITS = "other bits"
    NOT_COMPARED = "not compared"
    BUDGET = "budget"
    RECAPTURED = "captured again"
    WARNING = "warning"

    @property
    def is_problem(self) -> bool:
        """Whether the step is not fully planned, not equal or not within its budget; the rest is good to know."""
        return self not in (FindingKind.RECAPTURED, FindingKind.WARNING)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, or that is good to know."""

    kind: FindingKind
    what: str
    advice: str
    """What to do, in one line."""
    place: str = ""
    """A line of the user's code, as `model.py:12`; empty where none is to blame."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A few steps under a budget, beside the plain one."""

    name: str
    budget_bytes: int | None
    """What was asked for; None where nothing was planned, so that a share of the plain step's peak is not known."""
    graphs: int
    """What a step consists of, as far as it is planned."""
    ops: int
    saved_bytes: int | None
    """What plain PyTorch keeps for backward, beside parameters and inputs; None where it cannot be seen."""
    unplanned_bytes: int | None
    """The part of it that is kept outside of the plan."""
    same_bits: bool | None
    """Whether the planned step gives the same bits as the plain one; None where they could not be compared."""
    plain_peak_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    captures: tuple[int, ...]
    """Graphs that were captured in each of the steps: none after the first where nothing changes."""
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything is planned, equal and within the budget."""
        return not any(finding.kind.is_problem for finding in self.findings)

    @property
    def covered(self) -> float | None:
        """The share of what plain PyTorch keeps for backward that is planned; None where it is not known."""
        if not self.graphs:
            return 0.0
        if self.saved_bytes is None or self.unplanned_bytes is None:
            return None
        return max(0.0, 1.0 - self.unplanned_bytes / self.saved_bytes) if self.saved_bytes else 1.0

    @property
    def recaptures(self) -> int:
        """Graphs that were captured after the first step."""
        return sum(self.captures[1:])
