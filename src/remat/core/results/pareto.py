"""Time against memory: the fastest known schedule at each budget, what is proven about it, and other strategies.

A `Pareto` is what `remat.pareto` returns and what reports draw. Points of `auto` carry proven bounds; a point that was
really run carries what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One strategy at one budget; strategies that know no budget have the peak they reach as theirs."""

    solver: str
    budget_bytes: int
    peak_bytes: int
    """Predicted, as is `time_ns`."""
    time_ns: float
    bound_ns: float
    """No schedule within the budget is faster."""
    measured_peak_bytes: int | None = None
    measured_ratio: float | None = None
    """Measured step time over the plain step's, taken in turns."""

    @property
    def gap(self) -> float:
        """The share of the time that a perfect schedule could still save."""
        return max(0.0, 1 - self.bound_ns / self.time_ns) if self.time_ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Pareto:
    """What each amount of memory costs in time for one step, and what is proven impossible."""

    name: str
    device: str
    plain_peak_bytes: int
    base_time_ns: float
    """The time of the plain step's ops."""
    floor_bytes: int
    """No schedule fits in less."""
    points: tuple[ParetoPoint, ...]
    """The best known schedule at each budget, largest budget first."""
    baselines: tuple[ParetoPoint, ...] = ()

    def overhead(self, time_ns: float) -> float:
        """Time beyond the plain step's, as a share of it."""
        return time_ns / self.base_time_ns - 1 if self.base_time_ns > 0 else 0.0

    def save(self, path: str | Path) -> None:
        """Write the curve as JSON; the file appears whole or not at all."""
        from remat.core.files.pareto_file import save_pareto

        save_pareto(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Pareto:
        from remat.core.files.pareto_file import load_pareto

        return load_pareto(Path(path))

    def to_html(self, path: str | Path) -> Path:
        """Write a report that any browser opens offline."""
        from remat.report import write_report

        return write_report(path, self, kind="html")

    def _repr_html_(self) -> str:
        from remat.report.notebook import fragment

        return fragment(self)
