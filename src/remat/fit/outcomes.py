"""What comes of one combination: its peak, its time, and what both are made of.

`Traces` hands out traces by precision, micro-batch and depth, each made once; `Evaluator` simulates a combination, or
has it planned within the memory there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from remat.core.copies import Link, with_copies
from remat.core.problem import Problem, floor_bytes
from remat.core.schedule import plain_schedule
from remat.core.simulate import simulate
from remat.errors import InfeasibleBudget, RematError
from remat.fit.cluster import Cluster
from remat.fit.depth import TRACED, deepen
from remat.fit.levers import Levers, Precision, Recomputation
from remat.fit.state import RankState, rank_problem, state_of, update_peak
from remat.fit.step_trace import StepTrace
from remat.fit.timing import MicroBatchTime, StepTime, step_time
from remat.fit.tracing import trace_step
from remat.pytorch.explore.module_blocks import repeated_blocks

SMALLER_LAYERS, MANY_LAYERS = 12, 24
"""Models with many layers are planned with fewer first; the winner is planned as it is."""
SLACK = 0.003
"""Of a plan's budget, what is left to the rounding of CUDA's blocks."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One combination, predicted for one rank."""

    levers: Levers
    state: RankState
    peak_bytes: int
    time: StepTime
    fits: bool
    gap: float = 0.0
    """By which share a plan may be slower than the best there is; 0 where nothing is planned."""
    is_scaled: bool = False
    """Whether it was planned for fewer layers, and what that takes was scaled up."""

    @property
    def activation_bytes(self) -> int:
        """What comes and goes within the step: activations, gathered weights, gradients on their way."""
        return self.peak_bytes - self.state.resident_bytes

    @property
    def seconds_per_sample(self) -> float:
        return self.time.total_s / self.levers.batch


@dataclass(frozen=True)
class Traces:
    """A model's steps, traced on demand."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gpu: str | None
    devices: tuple[str | Path, ...] = ()
    seen: dict[Any, StepTrace] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Members of the one list of blocks; 0 where there is none, or several."""
        blocks = repeated_blocks(self.model)
        return len(blocks) if len({name.rpartition(".")[0] for name in blocks}) == 1 else 0

    def of(self, levers: Levers, layers: int | None = None) -> StepTrace:
        """With as many layers as one pipeline stage has, or as are asked for."""
        per_block = levers.recomputation is Recomputation.PER_BLOCK
        wanted = (layers or self.layers) // levers.pipeline_stages
        key = (levers.precision, levers.micro_batch, per_block, wanted)
        if key not in self.seen:
            self.seen[key] = self._deep(levers.precision, levers.micro_batch, per_block, wanted)
        return self.seen[key]

    def _deep(self, precision: Precision, micro: int, per_block: bool, layers: int) -> StepTrace:
        if layers > TRACED and self.layers > TRACED:
            key = (precision, micro, per_block, TRACED, "short")
            if key not in self.seen:
                self.seen[key] = self._trace(precision, micro, per_block, TRACED)
            deep = deepen(self.seen[key], layers)
            if deep is not None:
                return deep
        if layers > self.layers:
            raise RematError(
                f"{type(self.model).__name__} cannot be traced with {layers} layers: its blocks are not copies of each "
                "other, or fewer than 5; build it larger, or grow another size."
            )
        return self._trace(precision, micro, per_block, layers or None)

    def _trace(self, precision: Precision, micro: int, per_block: bool, layers: int | None) -> StepTrace:
        return trace_step(
            self.model,
            self.args,
            self.kwargs,
            precision=precision,
            gpu=self.gpu,
            devices=self.devices,
            layers=layers,
            per_block=per_block,
            batch=micro,
        )


@dataclass(frozen=True)
class Evaluator:
    traces: Traces
    cluster: Cluster
    time_limit_s: float = 2.0
    layers: int | None = None
    """Another depth than the model's."""

    def at_once(self, levers: Levers) -> Prediction:
        """A combination without a plan, simulated."""
        trace, state, problem = self._prepared(levers)
        seen = simulate(problem, plain_schedule(problem.graph))
        return self._outcome(levers, trace, state, seen.peak_bytes, seen.time_ns, 0.0)

    def optimistic(self, levers: Levers) -> Prediction:
        """With nothing computed again and the least memory that any schedule has: no plan is better."""
        within = replace(levers, recomputation=Recomputation.PLANNED, budget_bytes=self.cluster.capacity_bytes)
        trace, state, problem = self._prepared(within)
        plain = replace(levers, recomputation=Recomputation.NONE, budget_bytes=None)
        return self._outcome(plain, trace, state, floor_bytes(problem)[0], problem.base_time_ns, 0.0)

    def planned(self, levers: Levers, *, is_exact: bool = False) -> Prediction:
        """With the fastest plan that is found within the budget; over it where there is none.

        Unless it has to be exact, a deep model is planned with fewer layers, each with as much room as it would have.
        """
        assert levers.budget_bytes is not None, "a planned combination has a budget"
        trace, state, problem = self._prepared(levers)
        budget = int(levers.budget_bytes * (1 - SLACK))
        layers = len(trace.blocks)
        if not is_exact and layers >= MANY_LAYERS and self.traces.layers:
            smaller = replace(self, layers=SMALLER_LAYERS * levers.pipeline_stages)
            scaling = _Scaling(problem, smaller._prepared(levers)[2], layers, SMALLER_LAYERS)
            peak, time_ns, gap = self._solved(scaling.few.with_budget(scaling.down(budget)), levers)
            return replace(
                self._outcome(levers, trace, state, scaling.up(peak), scaling.time_ns(time_ns), gap), is_scaled=True
            )
        peak, time_ns, gap = self._solved(problem.with_budget(budget), levers)
        return self._outcome(levers, trace, state, peak, time_ns, gap)

    def _solved(self, problem: Problem, levers: Levers) -> tuple[int, float, float]:
        """Peak, time and gap; where nothing fits, the least that would."""
        from remat.solvers import solve

        within = self._movable(problem) if levers.offloads_activations else problem
        try:
            found = solve(within, "auto", time_limit_s=self.time_limit_s, seed=0)
        except InfeasibleBudget as refused:
            return refused.min_budget, problem.base_time_ns, 0.0
        return found.peak_bytes, found.time_ns, found.gap

    def _prepared(self, levers: Levers) -> tuple[StepTrace, RankState, Problem]:
        trace = self.traces.of(levers, self.layers)
        state = state_of(trace, levers)
        in_flight = min(levers.pipeline_stages, levers.accumulation) - 1
        problem = rank_problem(trace, levers, state)
        if in_flight:
            # Forward of other micro-batches has run, and what they keep waits.
            lives = simulate(problem, plain_schedule(problem.graph)).live_bytes
            kept = max(0, lives[max(0, trace.first_backward - 1)] - problem.resident_bytes)
            problem = replace(problem, resident_bytes=problem.resident_bytes + in_flight * kept)
        return trace, state, problem

    def _movable(self, problem: Problem) -> Problem:
        rate = self.cluster.host.bytes_per_s / 1e9
        link = Link(rate, rate, self.cluster.host.latency_s * 1e9)
        ops = problem.graph.ops
        first = next((place for place, op in enumerate(ops) if op.backward), len(ops))
        late = {value for op in ops[first:] for value in op.inputs} - set(problem.graph.outputs)
        values = [value for op in ops[:first] if op.recomputable for value in op.outputs if value in late]
        large = [value for value in values if problem.costs.size_bytes[value] >= 1 << 20]
        return with_copies(problem, [link.movable(value, problem.costs.size_bytes[value]) for value in large])

    def _outcome(
        self, levers: Levers, trace: StepTrace, state: RankState, peak: int, time_ns: float, gap: float
    ) -> Prediction:
        whole = max(peak, update_peak(trace, levers, state))
        place = trace.first_backward
        forward = sum(call.time_ns for call in trace.calls[:place])
        plain = self.traces.of(replace(levers, recomputation=Recomputation.NONE, budget_bytes=None), self.layers)
        micro = MicroBatchTime(forward, plain.time_ns - forward, max(0.0, time_ns - plain.time_ns))
        time = step_time(trace, levers, micro, state, self.cluster)
        return Prediction(levers, state, whole, time, whole <= self.cluster.capacity_bytes, gap)


class _Scaling:
    """A problem of many layers and the same of few: what each layer adds, and what is there once."""

    def __init__(self, many: Problem, few: Problem, layers: int, fewer: int) -> None:
        self.many, self.few = many, few
        self._ratio = layers / fewer
        peaks = [simulate(item, plain_schedule(item.graph)).peak_bytes - item.resident_bytes for item in (many, few)]
        each = (peaks[0] - peaks[1]) / (layers - fewer)
        self._once = max(0, int(peaks[0] - layers * each))

    def down(self, budget_bytes: int) -> int:
        room = budget_bytes - self.many.resident_bytes - self._once
        return int(self.few.resident_bytes + self._once + room / self._ratio)

    def up(self, peak_bytes: int) -> int:
        room = peak_bytes - self.few.resident_bytes - self._once
        return int(self.many.resident_bytes + self._once + room * self._ratio)

    def time_ns(self, few_ns: float) -> float:
        """What is computed again grows with the layers."""
        return self.many.base_time_ns + (few_ns - self.few.base_time_ns) * self._ratio


def readable(outcomes: Iterable[Prediction]) -> list[Prediction]:
    """Those that fit, fastest first."""
    return sorted((item for item in outcomes if item.fits), key=lambda item: item.seconds_per_sample)
