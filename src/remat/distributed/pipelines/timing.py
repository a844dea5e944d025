"""When each rank of a pipeline runs what, and where it waits: orders and times of stages in, spans out.

A forward waits for the stage before it, a backward for the stage after it. A rank that waits for the gradients of a
micro-batch can already compute again what their backward needs: these nanoseconds cost nothing as far as the wait goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from remat.distributed.pipelines.actions import Action, Orders, StageWork
from remat.distributed.pipelines.rank_memory import StageNeeds


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """One action of one rank, with what it computes again ahead of it."""

    rank: int
    action: Action
    early_ns: float
    """When it begins to compute again; where nothing is, when it begins."""
    begin_ns: float
    end_ns: float
    waits_ns: float
    """For how long the rank does nothing before it."""


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    spans: tuple[ActionSpan, ...]

    @property
    def total_ns(self) -> float:
        return max(span.end_ns for span in self.spans)

    def waits_ns(self, rank: int) -> float:
        """For how long a rank does nothing between its first action and its last."""
        return sum(span.waits_ns for span in self.spans if span.rank == rank)

    def waits_for_gradients(self, stage: int) -> tuple[float, ...]:
        """For each backward of a stage, for how long its rank does nothing before it."""
        parts = (StageWork.BACKWARD, StageWork.INPUTS_BACKWARD)
        return tuple(span.waits_ns for span in self.spans if span.action.stage == stage and span.action.work in parts)


def follow_pipeline(
    orders: Orders, needs: Mapping[int, StageNeeds], transfer_ns: float = 0.0, *, fills: bool = True
) -> PipelineTimes:
    """Each rank runs its actions one after another, as soon as what they read has come."""
    last = max(needs)
    done: dict[tuple[bool, int, int], float] = {}
    clock, place = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0)
    spans: list[ActionSpan] = []
    while any(place[rank] < len(order) for rank, order in orders.items()):
        ready = [
            rank
            for rank, order in orders.items()
            if place[rank] < len(order) and _awaited(order[place[rank]], last) <= done.keys()
        ]
        assert ready, "a schedule of torch never has ranks wait for each other in a circle"
        for rank in ready:
            action = orders[rank][place[rank]]
            come = max((done[key] + transfer_ns for key in _awaited(action, last)), default=0.0)
            span = _span(rank, action, clock[rank], come, needs[action.stage], fills=fills)
            spans.append(span)
            clock[rank], place[rank] = span.end_ns, place[rank] + 1
            if action.work is not StageWork.WEIGHTS_BACKWARD:
                done[action.work is StageWork.FORWARD, action.stage, action.micro] = span.end_ns
    return PipelineTimes(tuple(spans))


def _awaited(action: Action, last: int) -> set[tuple[bool, int, int]]:
    """(whether forward, stage, micro-batch) of what an action reads of others."""
    if action.work is StageWork.FORWARD:
        return {(True, action.stage - 1, action.micro)} if action.stage else set()
    if action.work is StageWork.WEIGHTS_BACKWARD or action.stage == last:
        return set()
    return {(False, action.stage + 1, action.micro)}


def _span(rank: int, action: Action, free: float, come: float, needs: StageNeeds, *, fills: bool) -> ActionSpan:
    if action.work is StageWork.FORWARD:
        begin = max(free, come)
        return ActionSpan(rank, action, begin, begin, begin + needs.forward_ns, begin - free)
    # Of a backward in two parts, each takes about half.
    share = 1.0 if action.work is StageWork.BACKWARD else 0.5
    early = needs.early_ns if action.work is not StageWork.WEIGHTS_BACKWARD else 0.0
    rest = share * (needs.backward_ns - needs.early_ns)
    if not fills:
        begin = max(free, come)
        return ActionSpan(rank, action, begin, begin, begin + early + rest, begin - free)
    begin = max(free + early, come)
    return ActionSpan(rank, action, free, begin, begin + rest, begin - free - early)
