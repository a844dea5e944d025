"""What was chosen for a compiled step, with what is needed to explain it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from remat.core.plan import Plan
from remat.errors import RematError


@dataclass(frozen=True, slots=True)
class CompiledPlan(Plan):
    """A plan over kernels instead of ops: its graph holds what can be in memory between them.

    The solvers do not know that kernels write into what they read last, so the peak of their schedule is above the
    peak of the compiled step.
    """

    compiled_peak_bytes: int = 0
    """What the compiled step needs, resident memory included."""
    saved: tuple[str, ...] = ()
    """Names of the values that backward takes from the forward."""
    is_default: bool = False
    """Whether this is what torch.compile does by itself."""
    loss_chunks: tuple[int, ...] = ()
    """For each loss that is computed in chunks, how many."""

    @property
    def predicted_peak(self) -> int:
        return self.compiled_peak_bytes

    def save(self, path: str | Path) -> None:
        """Not possible: what was compiled is kept by Inductor's cache, and what was found by measurement by ours."""
        raise RematError(
            f"The plan of a compiled step cannot be written to {path}: it belongs to what Inductor compiled in this "
            "process; plan eager kernels (without compiler=) to save a plan."
        )
