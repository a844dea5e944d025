"""What a TARGET is to the commands: something to plan, to profile and so on, whatever library it is written for.

In: a target and sizes. Out: a `TargetSubject`. Each library is one file here; commands know this protocol alone. A
command that has no meaning for a subject is refused by it in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from remat.cli.subjects.jax_loss import JaxLoss
from remat.cli.subjects.torch_model import TorchModel
from remat.cli.target import NO_SIZES, call_target, example_of, is_in_zoo, is_jax_loss, load_target, takes_size
from remat.core.budget import BudgetScope

if TYPE_CHECKING:
    from remat.core.results.estimate import Estimate
    from remat.core.results.max_batch import MaxBatch
    from remat.core.results.pareto import Pareto
    from remat.core.results.plan import Plan
    from remat.core.results.profile import StepProfile
    from remat.distributed.pretended import PretendedPlan
    from remat.solvers.base import Solver


@dataclass(frozen=True, slots=True)
class PlanRequest:
    budget: str
    solver: str
    time_limit_s: float
    seed: int
    count: BudgetScope = BudgetScope.LIVE
    compiler: str | None = None
    offload: str | None = None


@dataclass(frozen=True, slots=True)
class CurveRequest:
    """What `remat pareto` asks for."""

    points: int
    lead: Solver
    others: tuple[Solver, ...]
    time_limit_s: float
    seed: int
    verify: bool
    offload: str | None
    tell: Callable[[int, int, str], None]
    stop: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """What `remat max-batch` asks for."""

    budget: str
    axis: str
    grid: int
    time_limit_s: float
    seed: int
    offload: str | None = None
    tell: Callable[[str], None] = lambda what: None


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What `remat estimate` asks for."""

    optimizer: str
    amp: str
    gpu: str | None
    devices: tuple[Path, ...]


class TargetSubject(Protocol):
    """A training step that was named on the command line."""

    @property
    def sameness(self) -> str:
        """What `remat verify` has shown where it finds no difference."""
        ...

    def plan(self, asked: PlanRequest) -> Plan: ...

    def plan_for_ranks(self, asked: PlanRequest, parallel: str, ranks: int) -> PretendedPlan:
        """Of rank 0 of so many, which need not be here."""
        ...

    def profile(self, optimizer: str, amp: str) -> StepProfile: ...

    def estimate(self, asked: DeviceRequest) -> Estimate: ...

    def pareto(self, asked: CurveRequest) -> Pareto: ...

    def max_batch(self, asked: SizeRequest) -> MaxBatch: ...

    def differences(self, budget: str, solver: str, steps: int, seed: int) -> tuple[str, ...]:
        """Of the first of so many steps that has any."""
        ...


def open_subject(
    target: str,
    *,
    scale: str = "tiny",
    device: str = "auto",
    seed: int = 0,
    sizes: Mapping[str, float] = NO_SIZES,
) -> TargetSubject:
    """The target as what its factory makes it."""

    def rebuilt(axis: str, size: int) -> TargetSubject:
        return open_subject(target, scale=scale, device=device, seed=seed, sizes={**sizes, axis: size})

    if is_in_zoo(target):
        example = load_target(target, scale=scale, device=device, seed=seed, sizes=sizes)
        return TorchModel(target, example, lambda axis: True, rebuilt)
    made = call_target(target, seed, sizes)
    takes = lambda axis: takes_size(target, axis)  # noqa: E731
    if is_jax_loss(made):
        return JaxLoss.of(target, made, device, takes, rebuilt)
    return TorchModel(target, example_of(target, made, device), takes, rebuilt)
