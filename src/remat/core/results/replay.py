"""A schedule as the step it makes: what a plan predicts, in the same words as a step that was followed.

In: a plan and one of its schedules, the plan's own or the plain one. Out: a `StepProfile` whose memory is that of
`simulate` to the byte. Each version of a value is a storage of its own; what a plan knows as resident is there from
beginning to end, under the classes that the plan recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from remat.core.copies import without_copies
from remat.core.eager import as_eager
from remat.core.engines import CopyTimes, follow_copies
from remat.core.graph import Op, OpId, Transfer
from remat.core.results.plan import Plan
from remat.core.results.profile import (
    BEFORE,
    MemoryClass,
    Phase,
    ProfiledCopy,
    ProfiledOp,
    ProfiledStorage,
    StepProfile,
)
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import NO_VALUE, Timeline, simulate


def replay(plan: Plan, schedule: Schedule, name: str = "") -> StepProfile:
    """The step that `schedule` makes; it must be a valid schedule of the plan's problem."""
    timeline = simulate(plan.problem, schedule)
    times = follow_copies(plan.problem, schedule) if plan.problem.costs.copy_ns else None
    return StepProfile(
        name=name or plan.problem.graph.name,
        device=plan.fingerprint.device,
        torch_version=plan.fingerprint.torch_version,
        ops=tuple(_ops(plan, schedule, timeline, times)),
        storages=(*resident_storages(plan, len(schedule.steps)), *_versions(plan, schedule, timeline)),
        start_bytes=plan.problem.resident_bytes,
        seconds=timeline.time_ns / 1e9,
        is_estimate=True,
        copies=tuple(_copies(plan, schedule, times)) if times is not None else (),
    )


def _copies(plan: Plan, schedule: Schedule, times: CopyTimes) -> Iterator[ProfiledCopy]:
    for run in times.copies:
        op = plan.problem.graph.ops[schedule.steps[run.step]]
        is_back = op.transfer is Transfer.BACK
        size = plan.problem.costs.size_bytes[op.outputs[0] if is_back else op.inputs[0]]
        yield ProfiledCopy(op.name, op.module, size, run.start_ns, run.end_ns, is_back)


def replay_plain(plan: Plan, name: str = "") -> StepProfile:
    """The same step without Remat: every op once, as eager PyTorch runs it."""
    eager = replace(plan, problem=as_eager(without_copies(plan.problem)))
    return replay(eager, plain_schedule(plan.problem.graph), name)


def _ops(plan: Plan, schedule: Schedule, timeline: Timeline, times: CopyTimes | None) -> Iterator[ProfiledOp]:
    """What an op waits for copies counts as its own time."""
    ops, costs = plan.problem.graph.ops, plan.problem.costs
    began_backward = False
    freed = _freed_bytes(plan, schedule, timeline)
    seen: set[OpId] = set()
    for step, number in enumerate(schedule.steps):
        op, workspace = ops[number], costs.workspace_bytes[number]
        taken = timeline.overwritten[step] != NO_VALUE
        began_backward |= op.backward
        yield ProfiledOp(
            target=op.target or op.name,
            module=op.module,
            phase=_phase(op, again=number in seen, began_backward=began_backward),
            time_ns=costs.time_ns[number] + (times.waits_ns[step] if times is not None else 0.0),
            allocated_bytes=workspace + (0 if taken else sum(costs.size_bytes[value] for value in op.outputs)),
            freed_bytes=workspace + freed[step],
            workspace_bytes=workspace,
            live_bytes=timeline.live_bytes[step] - workspace,
        )
        seen.add(number)


def _freed_bytes(plan: Plan, schedule: Schedule, timeline: Timeline) -> list[int]:
    """What is dropped after each step; outputs of the graph are not."""
    graph, last = plan.problem.graph, len(schedule.steps) - 1
    outputs = frozenset(graph.outputs)
    freed = [0] * len(schedule.steps)
    for number, ends in zip(schedule.steps, timeline.last_uses, strict=True):
        for value, end in zip(graph.ops[number].outputs, ends, strict=True):
            if end < last or value not in outputs:
                freed[end] += plan.problem.costs.size_bytes[value]
    for step, taken in enumerate(timeline.overwritten):
        freed[step] -= plan.problem.costs.size_bytes[taken] if taken != NO_VALUE else 0
    return freed


def _phase(op: Op, *, again: bool, began_backward: bool) -> Phase:
    if op.transfer is not None:
        return Phase.BACKWARD if began_backward else Phase.FORWARD
    if again:
        return Phase.RECOMPUTE
    return Phase.BACKWARD if op.backward else Phase.FORWARD


def resident_storages(plan: Plan, end: int) -> Iterator[ProfiledStorage]:
    """One storage for each class; bytes that the plan has no class for are `OTHER`."""
    known = {kind.value: kind for kind in MemoryClass}
    left = plan.problem.resident_bytes
    for name, size in (*plan.breakdown_bytes, ("other", left)):
        part = min(size, left)
        left -= part
        if part:
            yield ProfiledStorage(known.get(name, MemoryClass.OTHER), part, name, "", BEFORE, end)


@dataclass(slots=True)
class _Version:
    """One computation of a value, while its uses are being found."""

    value: int
    op: OpId
    created: int
    freed: int
    last_forward_use: int = BEFORE
    first_backward_use: int = BEFORE


def _versions(plan: Plan, schedule: Schedule, timeline: Timeline) -> Iterator[ProfiledStorage]:
    graph, costs = plan.problem.graph, plan.problem.costs
    outputs = frozenset(graph.outputs)
    end = len(schedule.steps)
    for found in _follow(graph.ops, schedule, timeline):
        op = graph.ops[found.op]
        is_last = found.value in outputs and found.freed == end - 1
        yield ProfiledStorage(
            kind=MemoryClass.GRADIENT if op.backward and found.value in outputs else MemoryClass.ACTIVATION,
            size_bytes=costs.size_bytes[found.value],
            name=op.target or op.name,
            module=op.module,
            created=found.created,
            freed=end if is_last else found.freed,
            last_forward_use=found.last_forward_use,
            first_backward_use=found.first_backward_use,
            recompute_ns=costs.time_ns[found.op],
            value=found.value,
        )


def _follow(ops: Sequence[Op], schedule: Schedule, timeline: Timeline) -> list[_Version]:
    """Every version with its uses; what is made once backward has begun does not wait for it."""
    steps = schedule.steps
    boundary = next((step for step, number in enumerate(steps) if ops[number].backward), len(steps))
    versions: list[_Version] = []
    newest: dict[int, _Version] = {}
    for step, number in enumerate(steps):
        taken = timeline.overwritten[step]
        if taken != NO_VALUE:
            # From here on its bytes are those of the output.
            newest[taken].freed = step - 1
        for value in ops[number].inputs:
            version = newest[value]
            if step < boundary:
                version.last_forward_use = step
            elif version.created < boundary and version.first_backward_use == BEFORE:
                version.first_backward_use = step
        for value, last in zip(ops[number].outputs, timeline.last_uses[step], strict=True):
            newest[value] = _Version(value, number, step, last)
            versions.append(newest[value])
    return versions
