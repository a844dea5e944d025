"""Memory of one rank of a pipeline over a step: what its stages need in, its peak action by action out.

A micro-batch that has gone forward in a stage leaves `saved_bytes` until its backward ends. While an action runs, the
rank holds what is resident, what all other micro-batches have saved, and the action's own working set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from remat.distributed.pipelines.actions import Action, StageWork


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """Of one stage for one micro-batch, under some plan."""

    saved_bytes: int
    """Between forward and backward, its outputs included."""
    forward_peak_bytes: int
    """While forward runs, of what it makes."""
    backward_peak_bytes: int
    """The same of backward, what forward saved included."""
    forward_ns: float
    backward_ns: float
    early_ns: float = 0.0
    """Of backward, what can run before the gradients of the outputs are there."""


@dataclass(frozen=True, slots=True)
class StageHolds:
    """What a stage holds whatever the plan is."""

    gradient_bytes: int
    """Of its parameters."""
    sent_back_bytes: int
    """Gradients of its inputs, for one micro-batch."""
    output_bytes: int
    """Of one micro-batch."""
    is_last: bool
    keeps_gradients: bool = False
    """Whether gradients of an earlier step are there already."""
    loss_saved_bytes: int = 0
    """What the loss of one micro-batch leaves for its backward."""
    loss_peak_bytes: int = 0
    """The most that there is while a loss is computed, or goes back, beyond what the stage has saved."""


@dataclass(frozen=True, slots=True)
class RankHolds:
    """What a rank holds whatever the plans of its stages are."""

    stages: Mapping[int, StageHolds]
    resident_bytes: int
    """Parameters, optimizer state, the batch, room to receive in."""
    holds_sends: bool
    """Whether what was sent is let go of only at the end of the step."""
    returns_outputs: bool = True


@dataclass(frozen=True, slots=True)
class RankMoment:
    """One action of a rank, or the end of its step, for which there is none."""

    action: Action | None
    others_bytes: int
    """In memory besides what belongs to this micro-batch in this stage."""
    peak_bytes: int


def moments(order: Sequence[Action], needs: Mapping[int, StageNeeds], holds: RankHolds) -> Iterator[RankMoment]:
    """Follow a rank through its step."""
    current = holds.resident_bytes
    met: set[int] = set()
    """Stages that have gone back once: their gradients stay."""
    for action in order:
        stage, own = holds.stages[action.stage], needs[action.stage]
        saved = own.saved_bytes + stage.loss_saved_bytes
        if action.work is StageWork.FORWARD:
            yield RankMoment(action, current, current + own.forward_peak_bytes)
            if stage.loss_peak_bytes:
                yield RankMoment(action, current, current + own.saved_bytes + stage.loss_peak_bytes)
            current += saved
            continue
        others = current - saved
        peak = max(own.backward_peak_bytes, own.saved_bytes + stage.loss_peak_bytes)
        yield RankMoment(action, others, others + peak)
        if not action.ends:
            continue
        current = others + _left_behind(stage, holds, is_first=action.stage not in met)
        met.add(action.stage)
    returned = sum(item.output_bytes for item in holds.stages.values() if item.is_last and holds.returns_outputs)
    micros = len({action.micro for action in order})
    yield RankMoment(None, current, current + micros * returned)


def _left_behind(stage: StageHolds, holds: RankHolds, *, is_first: bool) -> int:
    """What stays when a micro-batch has gone back: gradients, what was sent, outputs that are returned."""
    left = stage.gradient_bytes if is_first and not stage.keeps_gradients else 0
    if holds.holds_sends or is_first:
        # Where each is let go of for the next, one of each is held from then on.
        left += stage.sent_back_bytes + (0 if stage.is_last else stage.output_bytes)
    if stage.is_last and holds.returns_outputs:
        left += stage.output_bytes
    return left


def peak_bytes(order: Sequence[Action], needs: Mapping[int, StageNeeds], holds: RankHolds) -> int:
    return max(moment.peak_bytes for moment in moments(order, needs, holds))


def around(order: Sequence[Action], needs: Mapping[int, StageNeeds], holds: RankHolds, stage: int) -> tuple[int, int]:
    """The most that there is beside a forward of a stage, and beside a backward of it."""
    forward = backward = 0
    for moment in moments(order, needs, holds):
        if moment.action is None or moment.action.stage != stage:
            continue
        if moment.action.work is StageWork.FORWARD:
            forward = max(forward, moment.others_bytes)
        else:
            backward = max(backward, moment.others_bytes)
    return forward, backward
