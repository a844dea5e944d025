"""A PyTorch model with its batch as what the commands ask of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from remat.cli.terminal.console import working
from remat.cli.training import Trainee
from remat.core.budget import parse_budget
from remat.core.results.max_batch import check_axis
from remat.errors import RematError
from remat.zoo import Example

if TYPE_CHECKING:
    from remat.cli.subjects import CurveRequest, DeviceRequest, PlanRequest, SizeRequest
    from remat.core.results.estimate import Estimate
    from remat.core.results.max_batch import MaxBatch
    from remat.core.results.pareto import Pareto
    from remat.core.results.plan import Plan
    from remat.core.results.profile import StepProfile
    from remat.distributed.pretended import PretendedPlan


@dataclass(frozen=True, slots=True)
class TorchModel:
    name: str
    example: Example
    takes: Callable[[str], bool]
    """Whether the target can be built at another batch or length; otherwise its tensors are repeated or cut."""
    rebuilt: Callable[[str, int], Any]
    sameness: str = "the same bits"

    def plan(self, asked: PlanRequest) -> Plan:
        import remat

        return remat.plan(self.example.model, *self.example.args, **_options(asked), **self.example.kwargs)

    def plan_for_ranks(self, asked: PlanRequest, parallel: str, ranks: int) -> PretendedPlan:
        from remat.distributed.pretended import plan_pretended

        model, args, kwargs = self.example.model, self.example.args, self.example.kwargs
        return plan_pretended(model, args, kwargs, engine=parallel, ranks=ranks, **_options(asked))

    def profile(self, optimizer: str, amp: str) -> StepProfile:
        from remat.pytorch.measure.profile_step import profile_call
        from remat.pytorch.measure.training_step import TrainingStep, make_optimizer, precision_of

        model, args, kwargs = self.example.model, self.example.args, dict(self.example.kwargs)
        precision = precision_of(amp)
        if not hasattr(model, "parameters"):
            return profile_call(partial(model, *args, **kwargs), self.name)
        step = TrainingStep(model, args, kwargs, make_optimizer(optimizer, model), precision)
        return profile_call(step, self.name)

    def estimate(self, asked: DeviceRequest) -> Estimate:
        from remat.pytorch.estimate.estimate_step import estimate

        return estimate(
            self.example.model,
            *self.example.args,
            optimizer=asked.optimizer,
            amp=asked.amp,
            gpu=asked.gpu,
            devices=asked.devices,
            **self.example.kwargs,
        )

    def pareto(self, asked: CurveRequest) -> Pareto:
        from remat.pytorch.explore.pareto import BudgetSearch, find_pareto
        from remat.pytorch.host.shared import checked_place

        search = BudgetSearch(
            asked.points,
            asked.lead,
            asked.others,
            asked.time_limit_s,
            asked.seed,
            asked.verify,
            checked_place(asked.offload),
            tell=asked.tell,
            stop=asked.stop,
        )
        return find_pareto(self.example.model, self.example.args, self.example.kwargs, search, self.name)

    def max_batch(self, asked: SizeRequest) -> MaxBatch:
        check_axis(asked.axis, asked.grid)
        from remat.pytorch.explore.max_batch import BatchSearch, find_max_batch
        from remat.pytorch.host.shared import checked_place

        build, usual = self.sized(asked.axis)
        budget = parse_budget(asked.budget)
        search = BatchSearch(
            budget,
            asked.axis,
            asked.grid,
            asked.time_limit_s,
            asked.seed,
            offload=checked_place(asked.offload),
            tell=asked.tell,
        )
        return find_max_batch(build, usual, search, self.name)

    def sized(self, axis: str) -> tuple[Callable[[int], Example], int]:
        """The example as a function of its batch or length, and the size it has by itself."""
        from remat.pytorch.explore.resize import resized, size_along

        usual = size_along(self.example, axis)
        if not self.takes(axis):
            return lambda size: resized(self.example, axis, size), usual
        return lambda size: self.rebuilt(axis, size).example, usual

    def differences(self, budget: str, solver: str, steps: int, seed: int) -> tuple[str, ...]:
        """Outputs, gradients, buffers and random state; both models are trained on between steps."""
        import remat

        model = self.example.model
        if not hasattr(model, "parameters"):
            raise RematError(f"remat verify compares modules; {self.name!r} gives a {type(model).__name__}.")
        plain = Trainee.plain(self.example)
        planned = Trainee.plain(replace(self.example, model=copy.deepcopy(model))).under(budget, solver)
        for step in range(1, steps + 1):
            with working(f"Comparing {self.name}, step {step} of {steps}"):
                result = remat.verify(plain.model, planned.model, *self.example.args, **self.example.kwargs)
            if not result.ok:
                return tuple(f"step {step}: {difference}" for difference in result.differences)
            if step < steps:
                plain.train_step(seed + step)
                planned.train_step(seed + step)
        return ()


def _options(asked: PlanRequest) -> dict[str, Any]:
    """As `remat.plan` takes them."""
    return {
        "budget": asked.budget,
        "solver": asked.solver,
        "time_limit": asked.time_limit_s,
        "seed": asked.seed,
        "count": asked.count.value,
        "compiler": asked.compiler,
        "offload": asked.offload,
    }
