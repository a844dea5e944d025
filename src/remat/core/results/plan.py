"""A schedule chosen for one computation on one device, with everything needed to check, explain and run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remat.core.arena import Arena
from remat.core.budget import BudgetScope, format_bytes
from remat.core.problem import Problem
from remat.core.results.profile import StepProfile
from remat.core.schedule import Schedule
from remat.core.solution import Solution, Status

if TYPE_CHECKING:
    from remat.core.results.explain import Comparison, Explanation


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a plan was made for; it is refused for anything else."""

    graph_hashes: tuple[str, ...]
    """One hash for each captured graph, in the order in which the step calls them."""
    torch_version: str
    """Of a step of jax, that of jax, as `jax 0.10.2`."""
    device: str
    shapes: tuple[str, ...]
    """The step's inputs, as `float32[16, 1024]`."""
    ranks: int = 1
    """How many train together, each of which holds its part."""


@dataclass(frozen=True, slots=True)
class CompiledCut:
    """Where one captured graph was cut in two, to be compiled as forward and backward."""

    saved: tuple[str, ...] = ()
    """Names of the values that backward takes from the forward."""
    is_default: bool = False
    """Whether this is what torch.compile does by itself."""
    loss_chunks: tuple[int, ...] = ()
    """For each loss that is computed in chunks, how many."""
    has_copies: bool = False
    """Whether backward makes values again more than once, as the plan's schedule says."""
    away_bytes: int = 0
    """What forward saves of it travels to the host and back, those made first."""


@dataclass(frozen=True, slots=True)
class ScanRun:
    """Neighbouring iterations of a loop, forward and backward of which follow one schedule of its body."""

    count: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlannedScan:
    """A loop of a step of jax whose iterations have plans of their own."""

    site: int
    """Which of the step's loops, in the order in which they are traced."""
    differentiated: tuple[int, ...]
    """Of its inputs, by place."""
    graph_hash: str
    """Of its body."""
    runs: tuple[ScanRun, ...]
    held: bool = False
    """Whether the order inside an iteration is held."""
    extra_ns: float = 0.0
    """What its iterations make again takes, all together."""


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """What became of a plan over kernels instead of ops, once a compiler had made code of it.

    The graph of such a plan holds what can be in memory between kernels. Its schedule does not know that kernels write
    into what they read last, so its peak is above that of the code.
    """

    peak_bytes: int
    """What the compiled step needs, resident memory included."""
    time_ns: float = 0.0
    """What its kernels are expected to take, one after the other."""
    cuts: tuple[CompiledCut, ...] = ()
    """Of each captured graph, in the order in which the step calls them."""
    step: StepProfile | None = None
    """Its kernels and what is in memory while each runs; None for a step of several graphs."""
    scans: tuple[PlannedScan, ...] = ()
    """How its loops run; of steps of jax alone."""
    held: bool = False
    """Whether the order of a schedule is held that makes nothing again; likewise."""
    seen_ns: float = 0.0
    """What its steps have taken; 0 before any has run where that is measured."""

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the values that backward takes from the forward."""
        return tuple(name for cut in self.cuts for name in cut.saved)

    @property
    def is_default(self) -> bool:
        """Whether this is what torch.compile does by itself."""
        return bool(self.cuts) and all(cut.is_default for cut in self.cuts)

    @property
    def loss_chunks(self) -> tuple[int, ...]:
        """For each loss that is computed in chunks, how many."""
        return tuple(count for cut in self.cuts for count in cut.loss_chunks)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What will run in a step, what it will need, and how far it is from the fastest that fits."""

    problem: Problem
    solution: Solution
    fingerprint: Fingerprint
    plain_peak_bytes: int
    """The peak of the same step in plain eager PyTorch: what "1x" means."""
    allocator_slack_bytes: int = 0
    """What the device's allocator, or a graph that is kept, takes at the peak beyond the live bytes."""
    breakdown_bytes: tuple[tuple[str, int], ...] = ()
    """What the resident bytes are made of, as (class, bytes)."""
    counts: BudgetScope = BudgetScope.LIVE
    """What the budget bounds."""
    arena: Arena | None = None
    """Addresses for everything that the schedule computes; None where it was not laid out."""
    compiled: CompiledStep | None = None
    """The code that runs instead of the schedule; None where eager kernels run it op by op."""
    offload: str = ""
    """Where values spend a while, as "cpu" or "disk:/a/folder"; empty where none leaves the device."""

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
        if self.compiled is not None:
            return self.compiled.peak_bytes
        return self.solution.peak_bytes + self.allocator_slack_bytes

    @property
    def predicted_time(self) -> float:
        """What forward and backward are expected to take on the device (nanoseconds)."""
        return self.solution.time_ns if self.compiled is None else self.compiled.seen_ns or self.compiled.time_ns

    @property
    def arena_bytes(self) -> int | None:
        """What the step takes where everything has its address ahead of time, resident memory included."""
        return None if self.arena is None else self.problem.resident_bytes + self.arena.height_bytes

    @property
    def counts_overwriting(self) -> bool:
        """Whether the peak counts on ops that write into dying inputs; if so, they do when the plan runs."""
        return any(op.overwrites for op in self.problem.graph.ops)

    @property
    def plain_time_ns(self) -> float:
        """What every op takes once; the loops of the problem have what their iterations make again in their times."""
        again = sum(scan.extra_ns for scan in self.compiled.scans) if self.compiled is not None else 0.0
        return self.problem.base_time_ns - again

    @property
    def overhead(self) -> float:
        """Recomputation time as a share of the plain step's time."""
        base = self.plain_time_ns
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
        from remat.core.files.plan_file import save_plan

        save_plan(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Plan:
        from remat.core.files.plan_file import load_plan

        return load_plan(Path(path))

    def explain(self, module: str = "") -> Explanation:
        """What the plan keeps and recomputes in `module` (all of the model by default), and what that costs."""
        from remat.core.results.explain import explain

        return explain(self, module)

    def compare(self, *solvers: str) -> Comparison:
        """Peak and time of this plan beside other strategies on the same problem."""
        from remat.core.results.explain import compare

        return compare(self, solvers)

    def to_html(self, path: str | Path) -> Path:
        """Write a report that any browser opens offline: what fills memory, what is done, what it costs."""
        from remat.report import write_report

        return write_report(path, self, kind="html")

    def __repr__(self) -> str:
        """In a line: all of it would be pages, and `explain` tells it."""
        needed = f"{format_bytes(self.predicted_peak)} of {format_bytes(self.budget_bytes)}"
        return f"<Plan: {needed}, {self.overhead:+.1%} time, gap {self.gap:.2%}, on {self.fingerprint.device}>"

    def _repr_html_(self) -> str:
        from remat.report.notebook import fragment

        return fragment(self)
