"""The planning problem of one stage: how much a micro-batch may leave behind, and how much it may need meanwhile.

In: a captured stage and three limits: bytes while forward runs, bytes while backward runs, and bytes that are saved
between them. Out: the fastest schedule within them. The solvers know one budget and live bytes at each step, so the
limits are put into the graph: a value that is there throughout backward takes what backward has less than forward, and
the op between them works in as much room as leaves exactly what may be saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from remat.core.memory_rules import memory_rules
from remat.core.problem import Costs, Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution
from remat.distributed.pipelines.early import early_steps
from remat.distributed.pipelines.rank_memory import StageNeeds
from remat.errors import InfeasibleBudget
from remat.pytorch.device import device_name
from remat.pytorch.graph.capture import Captured, with_held_tangents
from remat.pytorch.run.compose import Call, Outside, Passed, compose
from remat.within import fit_within

ENOUGH = 1 << 50
"""Bytes that no stage needs."""


@dataclass(frozen=True, slots=True)
class StageLimits:
    forward_bytes: int
    backward_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class StageProblem:
    captured: Captured
    costs: Costs
    is_last: bool
    """The gradients of its outputs come from a loss; those of others come into room that is there all the time."""

    def call(self) -> Call:
        return Call(self.captured if self.is_last else with_held_tangents(self.captured), self.costs)

    @property
    def received_bytes(self) -> int:
        """Of the incoming gradients, what is resident and in the graph, too."""
        return 0 if self.is_last else self._incoming_bytes

    @property
    def _incoming_bytes(self) -> int:
        values = self.captured.graph.ops[self.captured.boundary].outputs
        return sum(self.costs.size_bytes[value] for value in values)

    @property
    def output_bytes(self) -> int:
        """What a forward returns."""
        values = self.captured.graph.ops[self.captured.boundary].inputs
        return sum(self.costs.size_bytes[value] for value in values)

    def plain(self) -> Schedule:
        return plain_schedule(self.captured.graph)

    def problem(self, budget_bytes: int = 0, resident_bytes: int = 0) -> Problem:
        return Problem(self.call().captured.graph, self.costs, budget_bytes, resident_bytes)

    def needs(self, schedule: Schedule) -> StageNeeds:
        """What a micro-batch takes under a schedule."""
        live = simulate(self.problem(), schedule).live_bytes
        cut = schedule.steps.index(self.captured.boundary)
        times = [self.costs.time_ns[op] for op in schedule.steps]
        early = early_steps(self.captured, schedule)
        return StageNeeds(
            saved_bytes=live[cut] - self._incoming_bytes,
            forward_peak_bytes=max(live[:cut], default=0),
            backward_peak_bytes=max(live[cut:]) - self.received_bytes,
            forward_ns=sum(times[:cut]),
            backward_ns=sum(times[cut:]),
            early_ns=sum(times[cut + 1 : cut + 1 + early]),
        )

    def solve(self, limits: StageLimits, solver: str, time_limit_s: float, seed: int) -> Solution:
        """Raises `InfeasibleBudget`, whose smallest budget is for forward."""
        backward = min(limits.backward_bytes + self.received_bytes, limits.forward_bytes)
        less = limits.forward_bytes - backward
        room = max(0, backward - self._incoming_bytes - limits.saved_bytes)
        outside = Outside((Passed(less, born=0, held=1),) if less else (), (room, 0))
        step = compose([self.call()], outside)
        problem = Problem(step.graph, step.costs, limits.forward_bytes)
        fitted = fit_within(
            problem,
            solver,
            rules=memory_rules(device_name(self.captured.device)),
            time_limit_s=time_limit_s,
            seed=seed,
        )
        solution = fitted.solution
        assert solution.schedule is not None, "what does not fit is refused"
        return replace(solution, schedule=step.split(solution.schedule)[0])

    def least_saved_bytes(self, solver: str, time_limit_s: float) -> int:
        """What has to be saved, as nothing else makes it again."""
        wanted = self.output_bytes
        limits = StageLimits(ENOUGH, ENOUGH, wanted)
        try:
            self.solve(limits, solver, time_limit_s, 0)
        except InfeasibleBudget as error:
            return wanted + error.min_budget - ENOUGH
        return wanted
