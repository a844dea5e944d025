"""What one rank holds, class by class, whatever it computes: the state model.

In: a trace, for its parameters, and levers. Out: a `RankState` in bytes of the device and of the host. What comes and
goes within the step (activations, gathered weights, gradients before they are reduced) is in the trace itself;
`rank_problem` puts both together into what is simulated and solved.

| | replicated | ZeRO-1 | ZeRO-2 and 3 |
| --- | --- | --- | --- |
| weights | all | all | a shard |
| gradients | all, in DDP's buckets where there are several ranks | the same | a shard |
| optimizer state, masters | all | those of this rank's parameters | a shard |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from remat.core.problem import Problem
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero
from remat.fit.sharding import groups_of, sharded
from remat.fit.step_trace import StepTrace, TracedParameter

MASTER_BYTES = 4
"""Of a number in fp32."""
STEP_BYTES = 4
"""Adam counts its steps for each parameter, beside it where its kernels are fused."""
AWAY_BYTES = 3 << 29
"""What `remat.offload_optimizer` has on the device while it steps."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Bytes of one rank; all but `host` and `update` are on the device for the whole step."""

    parameters: int = 0
    masters: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    """That wait through the step: what earlier micro-batches added up, and DDP's buckets."""
    buckets: int = 0
    buffers: int = 0
    inputs: int = 0
    update: int = 0
    """What the optimizer needs beyond that while it steps, when no activation is there."""
    host: int = 0

    @property
    def resident_bytes(self) -> int:
        held = (item.name for item in fields(self) if item.name not in ("update", "host"))
        return sum(int(getattr(self, name)) for name in held)


def state_of(trace: StepTrace, levers: Levers) -> RankState:
    """The state of the fullest rank."""
    share = _share(trace, levers)
    weights = sum(trace.rounded(item.size_bytes) for item in trace.parameters)
    if levers.zero.is_sharded and levers.replicas > 1:
        weights = sum(
            trace.rounded(_shard_count(item, levers) * (MASTER_BYTES if levers.has_masters else item.item_bytes))
            for item in trace.parameters
        )
    gradients, buckets = _gradients(trace, levers)
    masters = share.masters if not _masters_are_weights(levers) else 0
    away = levers.offloads_optimizer
    # CPUOffloadPolicy has weights and gradients on the host too.
    all_away = away and levers.zero.is_sharded
    return RankState(
        parameters=0 if all_away else weights,
        masters=0 if away else masters,
        optimizer_state=0 if away else share.state,
        gradients=0 if all_away else gradients,
        buckets=buckets,
        buffers=trace.buffer_bytes,
        inputs=trace.input_bytes,
        update=_update_bytes(trace, levers, share),
        host=(masters + share.state if away else 0) + (weights + gradients if all_away else 0),
    )


def rank_problem(trace: StepTrace, levers: Levers, state: RankState | None = None) -> Problem:
    """Forward and backward of one micro-batch on one rank, with everything that is resident around it.

    For `PER_BLOCK` the trace is one of a model whose blocks are checkpointed: its plain schedule is the step.
    """
    state = state or state_of(trace, levers)
    several = levers.replicas > 1
    dying: Iterable[int] = ()
    if levers.zero.is_sharded and several:
        trace = sharded(trace, levers)
        dying = trace.gradients if levers.accumulation > 1 or levers.offloads_optimizer else ()
    elif several:
        # Gradients go into the buckets one by one; a plan hands them over together when its backward is over.
        dying = () if levers.recomputation is Recomputation.PLANNED else trace.gradients
    elif levers.accumulation > 1 or levers.steps_in_backward:
        dying = trace.gradients
    is_eager = levers.recomputation is not Recomputation.PLANNED
    resident = state.resident_bytes + (state.update if levers.steps_in_backward else 0)
    return trace.problem(resident, frozenset(dying), eager=is_eager)


def update_peak(trace: StepTrace, levers: Levers, state: RankState) -> int:
    """The most while the optimizer steps: all gradients are there, and no activation."""
    several, sharded_ranks = levers.replicas > 1, levers.zero.is_sharded and levers.replicas > 1
    if levers.accumulation > 1 or levers.steps_in_backward or (several and not sharded_ranks):
        fresh = 0
    elif sharded_ranks:
        size = sum(group.trained_bytes for group in groups_of(trace)) * (2 if levers.has_masters else 1)
        fresh = 0 if levers.offloads_optimizer else -(-size // levers.replicas)
    else:
        fresh = sum(trace.sizes[value] for value in trace.gradients)
    return state.resident_bytes + trace.held_bytes + fresh + state.update


@dataclass(frozen=True, slots=True)
class _Share:
    """Of the optimizer, what belongs to one rank."""

    masters: int
    state: int
    count: int
    """Of numbers that it updates."""
    tensors: int


def _share(trace: StepTrace, levers: Levers) -> _Share:
    trained = [item for item in trace.parameters if item.is_trained]
    counts = [item.count for item in trained]
    if levers.replicas > 1 and levers.zero is Zero.OPTIMIZER:
        counts = _largest_part(counts, levers.replicas)
    elif levers.replicas > 1 and levers.zero.is_sharded:
        counts = [_shard_count(item, levers) for item in trained]
    item_bytes = MASTER_BYTES if levers.has_masters or levers.precision is not Precision.PURE_BF16 else 2
    masters = sum(trace.rounded(MASTER_BYTES * count) for count in counts) if levers.has_masters else 0
    moments = levers.optimizer.states * sum(trace.rounded(item_bytes * count) for count in counts)
    steps = len(counts) * trace.rounded(STEP_BYTES) if levers.optimizer.is_adam else 0
    return _Share(masters, moments + steps, sum(counts), len(counts))


def _masters_are_weights(levers: Levers) -> bool:
    """Shards in fp32, gathered in bf16, are masters themselves."""
    return levers.zero.is_sharded and levers.replicas > 1


def _gradients(trace: StepTrace, levers: Levers) -> tuple[int, int]:
    """Gradients that wait through the step, and buckets."""
    item_bytes = 2 if levers.precision is Precision.PURE_BF16 else 4
    trained = [item for item in trace.parameters if item.is_trained]
    whole = sum(trace.rounded(item_bytes * item.count) for item in trained)
    several = levers.replicas > 1
    if several and not levers.zero.is_sharded:
        # Before the last micro-batch gradients add up beside the buckets.
        return (whole if levers.accumulation > 1 else 0), sum(item_bytes * item.count for item in trained)
    if levers.accumulation == 1:
        return 0, 0
    if several:
        size = MASTER_BYTES if levers.has_masters else item_bytes
        return sum(-(-group.trained_bytes * size // item_bytes // levers.replicas) for group in groups_of(trace)), 0
    return whole, 0


def _update_bytes(trace: StepTrace, levers: Levers, share: _Share) -> int:
    if levers.offloads_optimizer:
        on_device = not (levers.zero.is_sharded and levers.replicas > 1)
        return min(AWAY_BYTES, share.masters + share.state) if on_device else 0
    if trace.grain_bytes > 1 or levers.optimizer is OptimizerKind.SGD:
        # Fused kernels on a GPU, and plain sums, need nothing.
        return 0
    # On a CPU one parameter after the other: Adam's denominator, and the root it is made of.
    largest = max((item.size_bytes for item in trace.parameters if item.is_trained), default=0)
    return (2 if levers.optimizer.is_adam else 0) * largest


def _shard_count(item: TracedParameter, levers: Levers) -> int:
    """Numbers of one rank's shard, cut along the first dimension; the first rank has the larger part."""
    rows = item.rows or 1
    return -(-rows // levers.replicas) * (item.count // rows)


def _largest_part(counts: list[int], ranks: int) -> list[int]:
    """As ZeroRedundancyOptimizer deals them out: the largest first, each to whoever has least."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for count in sorted(counts, reverse=True):
        min(parts, key=sum).append(count)
    return max(parts, key=sum)


def optimizer_numbers(trace: StepTrace, levers: Levers) -> int:
    """How many numbers one rank's optimizer updates."""
    return _share(trace, levers).count
