"""A JAX loss with its parameters and batch as what the commands ask of it.

A factory returns (loss, parameters, batch): `loss(parameters, *batch)` is differentiated with respect to its
parameters. A loss that returns a pair is one with something that goes along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remat.cli.terminal.console import log, working
from remat.core.budget import BudgetScope, format_bytes, parse_budget
from remat.core.results.max_batch import check_axis
from remat.errors import RematError

if TYPE_CHECKING:
    from remat.cli.subjects import CurveRequest, DeviceRequest, PlanRequest, SizeRequest
    from remat.core.results.estimate import Estimate
    from remat.core.results.max_batch import MaxBatch
    from remat.core.results.pareto import Pareto
    from remat.core.results.plan import Plan
    from remat.core.results.profile import StepProfile
    from remat.distributed.pretended import PretendedPlan

RATE = 1e-3
"""Of the steps between comparisons."""


@dataclass(frozen=True, slots=True)
class JaxLoss:
    name: str
    loss: Callable[..., Any]
    args: tuple[Any, ...]
    """Parameters, then the batch."""
    has_aux: bool
    takes: Callable[[str], bool]
    """Whether the target can be built at another batch or length; otherwise its arrays are repeated or cut."""
    rebuilt: Callable[[str, int], Any]
    sameness: str = "the same results and gradients up to rounding"

    @staticmethod
    def of(
        name: str, made: Any, device: str, takes: Callable[[str], bool], rebuilt: Callable[[str, int], Any]
    ) -> JaxLoss:
        if device != "auto":
            raise RematError("--device is for PyTorch models; a JAX loss runs where JAX_PLATFORMS says.")
        import jax

        loss, parameters, batch = made
        args = (parameters, *(batch if isinstance(batch, tuple) else (batch,)))
        try:
            found = jax.eval_shape(loss, *args)
        except Exception as error:
            raise RematError(
                f"The loss of {name!r} cannot be traced on its batch: {type(error).__name__}: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error
        return JaxLoss(name, loss, args, isinstance(found, tuple) and len(found) == 2, takes, rebuilt)

    def plan(self, asked: PlanRequest) -> Plan:
        if asked.compiler is not None:
            raise RematError("A JAX loss is always compiled by XLA; leave --compiler out.")
        _refuse_copies(asked.offload)
        if asked.count is not BudgetScope.LIVE:
            raise RematError("XLA gives the values of a JAX loss their addresses; leave --count out.")
        import remat.jax

        return remat.jax.plan(
            self.loss,
            *self.args,
            budget=asked.budget,
            has_aux=self.has_aux,
            solver=asked.solver,
            time_limit_s=asked.time_limit_s,
            seed=asked.seed,
        )

    def plan_for_ranks(self, asked: PlanRequest, parallel: str, ranks: int) -> PretendedPlan:
        raise RematError("--world is for PyTorch models; shard the arrays of a JAX loss, and it is planned by device.")

    def profile(self, optimizer: str, amp: str) -> StepProfile:
        """Forward and backward as XLA would run them without recomputation; a loss has no optimizer."""
        if amp != "none":
            raise RematError("--amp is for PyTorch models; a JAX loss has the types that it computes in.")
        import remat.jax

        found = remat.jax.profile(self.loss, *self.args, has_aux=self.has_aux, name=self.name)
        log(
            f"Forward and backward of {self.name} as modelled; compiled, they need "
            f"{format_bytes(found.reserved_bytes)} in all"
        )
        return found

    def estimate(self, asked: DeviceRequest) -> Estimate:
        raise RematError(
            "remat estimate knows other devices for PyTorch models only; `remat profile` and `remat plan` tell what "
            "XLA needs for a JAX loss on this machine."
        )

    def pareto(self, asked: CurveRequest) -> Pareto:
        _refuse_copies(asked.offload)
        from remat.jax.exploring import CurveSearch, find_pareto

        search = CurveSearch(
            asked.points, asked.lead, asked.others, asked.time_limit_s, asked.seed, asked.verify, asked.tell, asked.stop
        )
        return find_pareto(self.loss, self.args, {}, search, has_aux=self.has_aux, name=self.name)

    def max_batch(self, asked: SizeRequest) -> MaxBatch:
        check_axis(asked.axis, asked.grid)
        _refuse_copies(asked.offload)
        from remat.jax.loop import Asked
        from remat.jax.sizes import SizeSearch, find_max_batch, resized, size_along

        def build(size: int) -> tuple[Any, ...]:
            if self.takes(asked.axis):
                return tuple(self.rebuilt(asked.axis, size).args)
            return (self.args[0], *resized(self.args[1:], asked.axis, size))

        solving = Asked(time_limit_s=asked.time_limit_s, seed=asked.seed)
        search = SizeSearch(parse_budget(asked.budget), asked.axis, asked.grid, solving, self.has_aux, asked.tell)
        return find_max_batch(self.loss, build, size_along(self.args[1:], asked.axis), search, self.name)

    def differences(self, budget: str, solver: str, steps: int, seed: int) -> tuple[str, ...]:
        """Results and gradients; parameters take a small step down the gradient in between."""
        import jax

        import remat.jax

        planned = remat.jax.optimize(self.loss, budget, has_aux=self.has_aux, solver=solver, seed=seed)
        parameters, *batch = self.args
        for step in range(1, steps + 1):
            with working(f"Comparing {self.name}, step {step} of {steps}"):
                found = remat.jax.verify(self.loss, planned, parameters, *batch, has_aux=self.has_aux)
            if not found.ok:
                return tuple(f"step {step}: {difference}" for difference in found.differences)
            if step < steps:
                change = jax.jit(jax.grad(planned, has_aux=self.has_aux))(parameters, *batch)
                change = change[0] if self.has_aux else change
                parameters = jax.tree.map(lambda old, slope: old - RATE * slope, parameters, change)
        return ()


def _refuse_copies(offload: str | None) -> None:
    if offload is not None:
        raise RematError("Plans of JAX losses copy nothing to the host; leave --offload out, or use remat.jax.policy.")
