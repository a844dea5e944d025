"""A schedule chosen for one computation on one device, with everything needed to check, explain and run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.arena import Arena
from remat.core.budget import Count
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.solution import Solution, Status

if TYPE_CHECKING:
    from remat.core.explain import Comparison, Explanation


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was made for; it is refused for anything else."""

    graph_hashes: tuple[str, ...]
    """One hash for each captured graph, in the order in which the step calls them."""
    torch_version: str
    device: str
    shapes: tuple[str, ...]
    """The step's inputs, as `float32[16, 1024]`."""


@dataclass(frozen=True, slots=True)
class Plan:
    problem: Problem
    solution: Solution
    fingerprint: Fingerprint
    plain_peak_bytes: int
    """The peak of the same step in plain eager PyTorch: what "1x" means."""
    allocator_slack_bytes: int = 0
    """What the device's allocator takes at the peak beyond the live bytes."""
    breakdown_bytes: tuple[tuple[str, int], ...] = ()
    """What the resident bytes are made of, as (class, bytes)."""
    counts: Count = Count.LIVE
    """What the budget bounds."""
    arena: Arena | None = None
    """Addresses for everything that the schedule computes; None where it was not laid out."""

    @property
    def status(self) -> Status:
        return self.solution.status

    @property
    def schedule(self) -> Schedule | None:
        return self.solution.schedule

    @property
    def budget_bytes(self) -> int:
        return self.problem.budget_bytes

    @property
    def predicted_peak(self) -> int:
        return self.solution.peak_bytes + self.allocator_slack_bytes

    @property
    def arena_bytes(self) -> int | None:
        """What the step takes where everything has its address ahead of time, resident memory included."""
        return None if self.arena is None else self.problem.resident_bytes + self.arena.height_bytes

    @property
    def counts_overwriting(self) -> bool:
        """Whether the peak counts on ops that write into dying inputs; if so, they do when the plan runs."""
        return any(op.overwrites for op in self.problem.graph.ops)

    @property
    def overhead(self) -> float:
        """Recomputation time as a share of the plain step's time."""
        base = self.problem.base_time_ns
        return self.solution.time_ns / base - 1 if base > 0 else 0.0

    @property
    def bound(self) -> float:
        """No schedule within the budget runs faster than this (nanoseconds)."""
        return self.solution.bound_ns

    @property
    def gap(self) -> float:
        return self.solution.gap

    @property
    def min_budget(self) -> int:
        return self.solution.min_budget_bytes

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        from remat.core.codec import save_plan

        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        from remat.core.codec import load_plan

        return load_plan(Path(path))

    def explain(self, module: str = "") -> Explanation:
        """What the plan keeps and recomputes in `module` (all of the model by default), and what that costs."""
        from remat.core.explain import explain

        return explain(self, module)

    def compare(self, *solvers: str) -> Comparison:
        """Peak and time of this plan beside other strategies on the same problem."""
        from remat.core.explain import compare

        return compare(self, solvers)

    def to_html(self, path: str | Path) -> Path:
        """Write a report that any browser opens offline: what fills memory, what is done, what it costs."""
        from remat.report import write_report

        return write_report(path, self, kind="html")

    def _repr_html_(self) -> str:
        from remat.report.notebook import fragment

        return fragment(self)
