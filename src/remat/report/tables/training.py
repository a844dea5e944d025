"""Two trainings of one model side by side, plain and under a budget: the facts behind the demo's table.

In: what was predicted and measured of both. Out: a frozen `TrainingComparison` and its JSON object.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class TrainingComparison:
    model: str
    device: str
    plain_losses: tuple[float, ...]
    """One loss for each optimizer step."""
    planned_losses: tuple[float, ...]
    budget_bytes: int
    plain_peak_bytes: int
    """Measured, as is `measured_peak_bytes`."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_seconds: float
    """Median time of a step, as is `planned_seconds`."""
    planned_seconds: float
    planning_seconds: float
    solver: str
    status: str
    gap: float
    note: str = ""
    """What the reader should know of the budget."""

    @property
    def same_losses(self) -> bool:
        return self.plain_losses == self.planned_losses

    @property
    def within_budget(self) -> bool:
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def time_ratio(self) -> float:
        return self.planned_seconds / self.plain_seconds if self.plain_seconds > 0 else float("nan")

    @property
    def prediction_error(self) -> float:
        """How far the prediction lies from the measurement, as a share of the measurement."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1 if self.measured_peak_bytes else 0.0

    def to_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "same_losses": self.same_losses,
            "within_budget": self.within_budget,
            "time_ratio": self.time_ratio,
            "prediction_error": self.prediction_error,
        }
