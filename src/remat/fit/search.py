"""Every combination that may be, the best of those that fit, and what else was looked at.

In: an `Evaluator`, the levers that may be pulled, and the batch. Out: a `LeversFound`. Combinations are taken in order of the
least time that they could take, with nothing computed again; one is planned only where it could still be among the
fastest, and what a plan with more memory was proven to take bounds those with less.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from remat.core.budget import format_bytes
from remat.errors import InfeasibleBudget
from remat.fit.levers import Levers, OptimizerKind, Precision, Recomputation, Zero, accumulation_for
from remat.fit.outcomes import Evaluator, Prediction, readable

DEFAULT_ALLOWED = frozenset({"bf16", "fp16", "pure-bf16", "recompute", "offload", "zero", "accumulate"})
"""What keeps fp32 weights, or masters of them; pipelines and activations on the host are for those who ask."""
MOST_MICRO_BATCHES = 5
ROWS = 6
"""Combinations beside the best that are planned too, for the table."""
PATIENCE_S = 30.0
"""After so long only combinations that could be the best are looked at."""
WORTHWHILE = 0.99
"""A combination is planned if it could take less than this share of the best one's time."""
LEANER = 0.6
"""Of what checkpointing per block needs beyond its state, the least that a plan is asked to do with."""
LARGEST_FREE_BATCH = 64
"""Where no batch is asked for, a rank takes at most so many samples at once."""


@dataclass(frozen=True, slots=True)
class LeversFound:
    """What a search saw."""

    outcomes: tuple[Prediction, ...]
    """Those that fit, fastest first."""
    misfits: tuple[Prediction, ...]
    """Those that were looked at closely and do not fit."""
    considered: int
    pruned: int
    """Of these, not looked at closely: too slow or too large whatever is recomputed."""
    seconds: float


@dataclass
class LeverSearch:
    evaluator: Evaluator
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    allowed: frozenset[str] = DEFAULT_ALLOWED
    batch: int | None = None
    tell: Callable[[str], None] = lambda message: None
    known: dict[Levers, Prediction] = field(default_factory=dict)

    def run(self) -> LeversFound:
        began = time.perf_counter()
        queue = self._first_bounds()
        considered, seen, refused = len(queue), list[Prediction](), list[Prediction]()
        turns = itertools.count(considered)
        while queue:
            bound, _, levers, is_own = heapq.heappop(queue)
            is_late = time.perf_counter() - began > PATIENCE_S
            if bound >= (WORTHWHILE * self._best(seen) if is_late else self._worst_row(seen)):
                queue.append((bound, 0, levers, is_own))
                break
            least = self._optimistic(levers)
            if not least.fits:
                refused.append(least)
            elif not is_own:
                # The bound was that of a larger micro-batch, whose samples take no longer.
                heapq.heappush(queue, (least.seconds_per_sample, next(turns), levers, True))
            else:
                self.tell(levers.label)
                seen += self._closely(levers, self._best(seen))
        seen = self._settled(seen)
        fitting = readable(seen)
        if not fitting:
            raise self._refusal([*seen, *refused])
        misfits = tuple(item for item in seen if not item.fits)
        return LeversFound(tuple(fitting), misfits, considered, len(queue) + len(refused), time.perf_counter() - began)

    def _settled(self, seen: list[Prediction]) -> list[Prediction]:
        """The winner is planned as it is, until it is one that was."""
        while (fitting := readable(seen)) and fitting[0].is_scaled:
            self.tell(f"planning {fitting[0].levers.label}")
            exact = self.evaluator.planned(fitting[0].levers, is_exact=True)
            seen = [exact if item is fitting[0] else item for item in seen]
        return seen

    def _first_bounds(self) -> list[tuple[float, int, Levers, bool]]:
        """A lower bound for each combination, from the largest micro-batch of its kind: only that one is traced."""
        largest: dict[Levers, float] = {}
        queue: list[tuple[float, int, Levers, bool]] = []
        for number, levers in enumerate(self.combinations()):
            kind = replace(levers, micro_batch=1, accumulation=1)
            if kind not in largest:
                largest[kind] = self._optimistic(levers).seconds_per_sample
            queue.append((largest[kind], number, levers, False))
        heapq.heapify(queue)
        return queue

    def _optimistic(self, levers: Levers) -> Prediction:
        if levers not in self.known:
            self.known[levers] = self.evaluator.optimistic(levers)
        return self.known[levers]

    def _best(self, seen: list[Prediction]) -> float:
        return min((item.seconds_per_sample for item in seen if item.fits), default=math.inf)

    def _worst_row(self, seen: list[Prediction]) -> float:
        """What a combination has to be faster than to stand in the table."""
        fitting = readable(seen)
        return fitting[ROWS].seconds_per_sample if len(fitting) > ROWS else math.inf

    def _closely(self, levers: Levers, best: float) -> Iterator[Prediction]:
        """As it is, where it fits; else checkpointed, and planned within the memory there is where that could win."""
        plain = self.evaluator.at_once(levers)
        yield plain
        if plain.fits or "recompute" not in self.allowed:
            return
        per_block = None
        if self.evaluator.traces.layers:
            per_block = self.evaluator.at_once(replace(levers, recomputation=Recomputation.PER_BLOCK))
            yield per_block
        could_win = plain.seconds_per_sample < WORTHWHILE * best
        if self._may_be_planned(per_block) and (could_win or per_block is None or not per_block.fits):
            yield from map(self.evaluator.planned, self._plans(levers))

    def _may_be_planned(self, per_block: Prediction | None) -> bool:
        """A plan can do with less than checkpointing per block, but not with very much less."""
        if per_block is None:
            return True
        room = self.evaluator.cluster.capacity_bytes - per_block.state.resident_bytes
        return room >= LEANER * per_block.activation_bytes

    def _plans(self, levers: Levers) -> Iterator[Levers]:
        budget = self.evaluator.cluster.capacity_bytes
        planned = replace(levers, recomputation=Recomputation.PLANNED, budget_bytes=budget)
        yield planned
        if "offload-activations" in self.allowed:
            yield replace(planned, offloads_activations=True)

    def combinations(self) -> Iterator[Levers]:
        """All that make sense together and can be set up; recomputation is left to `_closely`."""
        world = self.evaluator.cluster.gpus
        axes = itertools.product(self._precisions(), self._stages(world), self._zeros(world), (False, True))
        for precision, stages, zero, away in axes:
            if away and "offload" not in self.allowed:
                continue
            base = Levers(
                precision,
                self.optimizer,
                zero if world > stages else Zero.REPLICATED,
                offloads_optimizer=away,
                pipeline_stages=stages,
                world=world,
            )
            if base.obstacle and stages == 1:
                continue
            yield from (replace(base, micro_batch=micro, accumulation=count) for micro, count in self._sizes(base))

    def _precisions(self) -> list[Precision]:
        rates = dict(self.evaluator.cluster.device.flops_per_ns)
        found = [Precision.FP32]
        if "bf16" in rates:
            found += [item for item in (Precision.BF16, Precision.PURE_BF16) if item.value in self.allowed]
        elif "fp16" in rates and "fp16" in self.allowed:
            found.append(Precision.FP16)
        return found

    def _stages(self, world: int) -> list[int]:
        layers = self.evaluator.layers or self.evaluator.traces.layers
        if "pipeline" not in self.allowed or not layers:
            return [1]
        return [count for count in (1, 2, 4, 8, 16) if count <= world and not world % count and not layers % count]

    def _zeros(self, world: int) -> list[Zero]:
        return list(Zero) if world > 1 and "zero" in self.allowed else [Zero.REPLICATED]

    def _sizes(self, levers: Levers) -> Iterator[tuple[int, int]]:
        """Micro-batches and how often: powers of two and the whole share, the largest first."""
        if self.batch is None:
            share = LARGEST_FREE_BATCH
            sizes = [2**power for power in range(share.bit_length() - 1, -1, -1)]
            yield from ((micro, 1) for micro in sizes[-MOST_MICRO_BATCHES - 1 :])
            return
        share = accumulation_for(self.batch, 1, levers.replicas)
        divisors = [micro for micro in range(share, 0, -1) if not share % micro and share // micro in POWERS]
        if levers.pipeline_stages > 1:
            divisors = [micro for micro in divisors if share // micro >= levers.pipeline_stages] or [1]
        allowed = divisors[:MOST_MICRO_BATCHES] if "accumulate" in self.allowed else divisors[:1]
        yield from ((micro, share // micro) for micro in allowed)

    def _refusal(self, seen: list[Prediction]) -> InfeasibleBudget:
        leanest = min(seen, key=lambda item: item.peak_bytes)
        cluster = self.evaluator.cluster
        needed = _ranks_that_hold(self.evaluator, leanest.levers)
        more = f"about {needed} such GPUs with ZeRO-3, or " if needed is not None else ""
        return InfeasibleBudget(
            f"Nothing fits {cluster.gpus} x {cluster.device.name} ({format_bytes(cluster.capacity_bytes)} each for "
            f"tensors): the leanest of {len(seen)} combinations ({leanest.levers.label}) needs "
            f"{format_bytes(leanest.peak_bytes)} on each, {format_bytes(leanest.state.resident_bytes)} of it state; "
            f"take {more}GPUs with that much, or allow more levers.",
            leanest.peak_bytes,
        )


POWERS = frozenset(2**power for power in range(20))


def _ranks_that_hold(evaluator: Evaluator, levers: Levers) -> int | None:
    """The smallest power of two of ranks among which ZeRO-3 makes it fit; None where no number does."""
    for ranks in (2**power for power in range(1, 14)):
        wanted = replace(
            levers,
            world=ranks,
            pipeline_stages=1,
            zero=Zero.WEIGHTS,
            accumulation=1,
            recomputation=Recomputation.NONE,
            budget_bytes=None,
        )
        if ranks > evaluator.cluster.gpus and evaluator.optimistic(wanted).fits:
            return ranks
    return None
