"""Ways to train one model side by side: what each needs and takes, predicted and, where it ran, measured.

A `FitSheet` is what `remat fit` and `remat ladder` tell; tables, charts and pages are made of it alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FitRow:
    """One combination on one rank."""

    label: str
    peak_bytes: int
    seconds_per_sample: float
    fits: bool
    memory: tuple[tuple[str, int], ...] = ()
    """What the peak is made of."""
    times: tuple[tuple[str, float], ...] = ()
    """What the step's seconds are made of."""
    measured_peak_bytes: int | None = None
    measured_seconds_per_sample: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class FitSheet:
    title: str
    capacity_bytes: int
    """Of each device, for tensors."""
    rows: tuple[FitRow, ...]
    sentences: tuple[str, ...] = ()
    """Why, in words."""
