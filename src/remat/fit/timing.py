"""How long a step takes: computation, collectives that it does not hide, the update, copies, the pipeline's bubble.

In: nanoseconds of forward and backward of one micro-batch, the trace's groups, levers and a cluster. Out: a `StepTime`
whose parts add up. Collectives run beside computation: a phase takes the longer of the two, and the first gather and
the last reduction have nothing to hide behind. A plan under DDP hands over gradients together when its backward is
over, so that their reduction hides behind nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from remat.fit.cluster import HOST_BYTES_PER_S, Cluster
from remat.fit.levers import Levers, Recomputation, Zero
from remat.fit.sharding import groups_of
from remat.fit.state import RankState, optimizer_numbers
from remat.fit.step_trace import StepTrace
from remat.pytorch.costs.collective_costs import RankLink

BANDWIDTH_SHARE = 0.7
"""Of a device's peak bandwidth, what the update reaches."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step, in parts that add up."""

    compute_s: float
    recompute_s: float = 0.0
    communication_s: float = 0.0
    """What computation does not hide."""
    update_s: float = 0.0
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.recompute_s + self.communication_s + self.update_s + self.bubble_s


@dataclass(frozen=True, slots=True)
class MicroBatchTime:
    """Nanoseconds of one micro-batch on one rank."""

    forward_ns: float
    backward_ns: float
    recompute_ns: float = 0.0


def step_time(trace: StepTrace, levers: Levers, micro: MicroBatchTime, state: RankState, cluster: Cluster) -> StepTime:
    forward, backward = micro.forward_ns / 1e9, (micro.backward_ns + micro.recompute_ns) / 1e9
    compute = (micro.forward_ns + micro.backward_ns) / 1e9 * levers.accumulation
    recompute = micro.recompute_ns / 1e9 * levers.accumulation
    bubble = (forward + backward) * (levers.pipeline_stages - 1)
    exposed = _exposed(trace, levers, forward, backward, cluster)
    return StepTime(compute, recompute, exposed, _update_s(trace, levers, state, cluster), bubble)


def _exposed(trace: StepTrace, levers: Levers, forward: float, backward: float, cluster: Cluster) -> float:
    ranks = levers.replicas
    if ranks == 1:
        return 0.0
    link, groups = cluster.link(levers.world), groups_of(trace)
    if not levers.zero.is_sharded:
        total = sum(group.trained_bytes for group in groups)
        reduced = link.reduce_s(total, ranks)
        planned = levers.recomputation is Recomputation.PLANNED
        exposed = reduced if planned else max(0.0, reduced - backward)
        after = link.gather_s(sum(group.gathered_bytes for group in groups), ranks)
        return exposed + (after if levers.zero is Zero.OPTIMIZER else 0.0)
    gathers = [_gather_s(link, group.gathered_bytes, ranks, levers, cluster) for group in groups]
    scatters = [link.gather_s(group.trained_bytes * (2 if levers.has_masters else 1), ranks) for group in groups]
    again = sum(gathers) if levers.zero is Zero.WEIGHTS else 0.0
    waits = max(0.0, sum(gathers) - forward) + max(0.0, again + sum(scatters) - backward)
    return levers.accumulation * (waits + gathers[0] + scatters[-1])


def _gather_s(link: RankLink, size_bytes: int, ranks: int, levers: Levers, cluster: Cluster) -> float:
    """Shards that lie on the host come to the device first."""
    from_host = size_bytes / ranks / cluster.host.bytes_per_s if levers.offloads_optimizer else 0.0
    return link.gather_s(size_bytes, ranks) + from_host


def _update_s(trace: StepTrace, levers: Levers, state: RankState, cluster: Cluster) -> float:
    """The optimizer reads weights, gradients and state, and writes weights and state."""
    count = optimizer_numbers(trace, levers)
    moved = count * (2 * levers.precision.weight_bytes + levers.precision.weight_bytes)
    moved += 2 * (state.optimizer_state + state.masters) if not levers.offloads_optimizer else 0
    on_device = moved / (cluster.device.bytes_per_ns * 1e9 * BANDWIDTH_SHARE)
    if not levers.offloads_optimizer:
        return on_device
    if levers.zero.is_sharded and levers.replicas > 1:
        return (moved + 2 * state.host) / HOST_BYTES_PER_S
    # There and back at the same time, beside the update.
    return max(on_device, state.host / cluster.host.bytes_per_s)
