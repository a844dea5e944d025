"""One training step followed op by op: which storages it holds, what they are, and when they come and go.

A `StepProfile` comes from a real step (`remat.profile`), from a step on fake tensors (`remat.estimate`) or from a plan
(`core.replay`); reports and tables read nothing else. A storage belongs to one class for its whole life, the one that
it turns out to have: what ends as a parameter's gradient is a gradient from birth. `live_bytes` of an op is what the
device's allocator had handed out when the op was over, found without regard to classes; the storages say the same a
second time, class by class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

BEFORE = -1
"""Stands for an op before the first: what was there when the step began."""


class MemoryClass(StrEnum):
    """In the order in which charts stack them."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "inputs"
    GRADIENT = "gradients"
    ACTIVATION = "activations"
    WORKSPACE = "workspace"
    OTHER = "other"


class Phase(StrEnum):
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    """A forward op that runs again because what it made was dropped."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class ProfiledOp:
    """One operator of the step, in the order in which they ran."""

    target: str
    """As `aten.mm.default`."""
    module: str
    """Where the user's model computes it, as `layers.3.mlp`; in backward, where its forward was."""
    phase: Phase
    time_ns: float
    allocated_bytes: int
    """Everything it allocated, what it freed again included."""
    freed_bytes: int
    """What was freed while it ran and until the next op began."""
    workspace_bytes: int
    """The most it held beyond what it leaves behind."""
    live_bytes: int
    """In memory once it is over and before anything is dropped."""


@dataclass(frozen=True, slots=True)
class ProfiledStorage:
    """One storage; positions are those of ops."""

    kind: MemoryClass
    size_bytes: int
    name: str
    """A parameter's or buffer's name, `gradient of` one, or what made it, as `aten.mm.default`."""
    module: str
    created: int
    """The op that allocated it, or `BEFORE`."""
    freed: int
    """The op after which it was gone; the number of ops where it outlives the step."""
    last_forward_use: int = BEFORE
    first_backward_use: int = BEFORE
    """`BEFORE` where nothing in backward reads it, and for what backward made itself."""
    recompute_ns: float = 0.0
    """What running the ops that made it once more would take; 0 for what no op of the step made."""
    value: int = BEFORE
    """Which value of a plan's graph it holds: the same for every version; `BEFORE` where there is no plan."""

    @property
    def waits_for_backward(self) -> bool:
        return self.created != BEFORE and self.first_backward_use != BEFORE


@dataclass(frozen=True, slots=True)
class ModuleTotal:
    """What one module adds up to: its own ops and storages, children not included."""

    module: str
    op_count: int
    time_ns: float
    parameter_bytes: int
    activation_bytes: int
    """Activations that wait for backward."""
    at_peak_bytes: int


@dataclass(frozen=True, slots=True)
class ProfiledCopy:
    """A copy between the device and the host, beside the ops; times are from the start of the step."""

    name: str
    module: str
    size_bytes: int
    start_ns: float
    end_ns: float
    is_back: bool
    """Whether it comes back from the host."""


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step op by op: times, allocations, and whose memory it was at every moment."""

    name: str
    device: str
    torch_version: str
    ops: tuple[ProfiledOp, ...]
    storages: tuple[ProfiledStorage, ...]
    start_bytes: int
    """In memory when the step began."""
    seconds: float
    """The step's time without the profiler; for an estimate, by roofline."""
    reserved_bytes: int = 0
    """What a caching allocator had taken from the device at most; 0 where there is none."""
    is_estimate: bool = False
    stopped_by: str = ""
    """Why the step did not come to its end; empty where it did."""
    copies: tuple[ProfiledCopy, ...] = ()
    """Known of plans alone; they are not kept in files of profiles."""

    def save(self, path: str | Path) -> None:
        """Write versioned JSON; the file appears whole or not at all."""
        from remat.core.files.profile_file import save_profile

        save_profile(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> StepProfile:
        """Read and check a profile; a damaged or foreign file is a `FileFormatError`."""
        from remat.core.files.profile_file import load_profile

        return load_profile(Path(path))

    def to_html(self, path: str | Path) -> Path:
        """Write a report that any browser opens offline."""
        from remat.report import write_report

        return write_report(path, self, kind="html")

    def _repr_html_(self) -> str:
        from remat.report.notebook import fragment

        return fragment(self)

    @property
    def peak_op(self) -> int:
        """The op during which most was in memory."""
        if not self.ops:
            return BEFORE
        during = self.during_bytes
        return max(range(len(during)), key=during.__getitem__)

    @property
    def peak_bytes(self) -> int:
        return max(self.during_bytes, default=self.start_bytes)

    @property
    def during_bytes(self) -> tuple[int, ...]:
        """The most in memory while each op runs."""
        return tuple(op.live_bytes + op.workspace_bytes for op in self.ops)

    def idle_ns(self, storage: ProfiledStorage) -> float:
        """How long an activation lay unused between forward and backward."""
        if not storage.waits_for_backward:
            return 0.0
        start = max(storage.created, storage.last_forward_use)
        return sum(op.time_ns for op in self.ops[start + 1 : storage.first_backward_use])

    def bytes_by_class(self) -> dict[MemoryClass, tuple[int, ...]]:
        """What each class holds when each op is over; workspace, which is then gone, is what the op needed."""
        change = {kind: [0] * (len(self.ops) + 1) for kind in MemoryClass}
        for storage in self.storages:
            change[storage.kind][max(0, storage.created)] += storage.size_bytes
            change[storage.kind][min(storage.freed + 1, len(self.ops))] -= storage.size_bytes
        lines = {kind: tuple(accumulate(change[kind][:-1])) for kind in MemoryClass}
        lines[MemoryClass.WORKSPACE] = tuple(
            held + op.workspace_bytes for held, op in zip(lines[MemoryClass.WORKSPACE], self.ops, strict=True)
        )
        return lines

    def breakdown(self) -> dict[MemoryClass, int]:
        """What the peak is made of, largest first; adds up to `peak_bytes`."""
        position = self.peak_op
        if position == BEFORE:
            parts = {kind: sum(item.size_bytes for item in self.storages if item.kind is kind) for kind in MemoryClass}
        else:
            parts = {kind: line[position] for kind, line in self.bytes_by_class().items()}
        return dict(sorted(((kind, size) for kind, size in parts.items() if size), key=lambda part: -part[1]))

    def live_at(self, position: int) -> tuple[ProfiledStorage, ...]:
        """The storages in memory while op `position` runs, largest first."""
        found = (item for item in self.storages if item.created <= position <= item.freed)
        return tuple(sorted(found, key=lambda item: -item.size_bytes))

    def modules(self) -> tuple[ModuleTotal, ...]:
        """One row for each module, the one with most in memory at the peak first."""
        names = dict.fromkeys([*(op.module for op in self.ops), *(item.module for item in self.storages)])
        position = self.peak_op
        ops = {name: [op for op in self.ops if op.module == name] for name in names}
        rows = [_total(name, ops[name], [s for s in self.storages if s.module == name], position) for name in names]
        return tuple(sorted(rows, key=lambda row: (-row.at_peak_bytes, -row.time_ns)))


def _total(name: str, ops: Sequence[ProfiledOp], storages: Sequence[ProfiledStorage], peak: int) -> ModuleTotal:
    return ModuleTotal(
        module=name,
        op_count=len(ops),
        time_ns=sum(op.time_ns for op in ops),
        parameter_bytes=sum(item.size_bytes for item in storages if item.kind is MemoryClass.PARAMETER),
        activation_bytes=sum(
            item.size_bytes for item in storages if item.kind is MemoryClass.ACTIVATION and item.waits_for_backward
        ),
        at_peak_bytes=sum(item.size_bytes for item in storages if item.created <= peak <= item.freed),
    )
