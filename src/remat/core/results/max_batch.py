"""How large a batch, or how long a sequence, fits a budget: plainly, with per-block checkpointing, and with Remat.

A `MaxBatch` is what `remat.max_batch_size` returns and what reports print.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.errors import BudgetError, UnknownName

AXES = {"batch": 0, "length": 1}
"""What can grow, and which dimension of the step's tensors that is."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest size one way of training reaches; 0 where not even the smallest fits."""

    size: int
    peak_bytes: int
    """Predicted at that size."""
    overhead: float
    """Time beyond the plain step of the same size, as a share of it."""


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest batch, or length, that fits a budget, and how it is trained."""

    name: str
    device: str
    axis: str
    """`batch` or `length`."""
    grid: int
    """Sizes are multiples of this."""
    budget_bytes: int
    plain: Limit
    checkpointed: Limit | None
    """`torch.utils.checkpoint` around each repeated block; None where the model has none."""
    ours: Limit
    predicted: int
    """Our size as it was predicted, before anything ran at it."""
    measured_peak_bytes: int | None
    """What a real step at our size needed; None where none was run."""
    real_steps: int
    time_error: float
    """By which share predicted times may be off."""
    note: str = ""
    """Why sizes were captured one by one; empty where laws predicted them."""
    offload: str = ""
    """Where values of our step spend a while; empty where none does."""

    @property
    def size(self) -> int:
        """The largest size that fits with Remat."""
        return self.ours.size

    @property
    def gain(self) -> float:
        """Times the size that fits plainly; infinite where nothing does."""
        return self.size / self.plain.size if self.plain.size else float("inf")


def check_axis(axis: str, grid: int) -> None:
    """Refuse an axis that does not exist and a grid without sizes."""
    if axis not in AXES:
        raise UnknownName(f"There is no axis {axis!r}; choose one of {', '.join(AXES)}.")
    if grid < 1:
        raise BudgetError(f"A grid of {grid} has no sizes; give 1 or more.")
