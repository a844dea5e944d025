"""A compiled step in the words of a step that was followed: its kernels are the ops, its buffers the storages.

In: a `KernelTimeline`, and which module each node of the graph is from. Out: a `StepProfile` that reports draw. Kernels
that backward runs only to make values of the forward again are marked. How long each takes is not known ahead: all
get the same share of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from remat.core.results.profile import BEFORE, MemoryClass, Phase, ProfiledOp, ProfiledStorage, StepProfile
from remat.inductor.dry_run.timeline import KernelCall, KernelTimeline


@dataclass(frozen=True, slots=True)
class Origin:
    """A node of the graph that kernels were made from."""

    module: str
    in_backward: bool


def as_profile(
    timeline: KernelTimeline,
    origins: Mapping[str, Origin],
    resident: tuple[ProfiledStorage, ...],
    *,
    device: str,
    torch_version: str,
    seconds: float,
) -> StepProfile:
    """`resident` is what is there all the time."""
    start = sum(item.size_bytes for item in resident)
    return StepProfile(
        name="",
        device=device,
        torch_version=torch_version,
        ops=tuple(_ops(timeline, origins, start, 1e9 * seconds / len(timeline.calls))),
        storages=(*resident, *_storages(timeline, origins)),
        start_bytes=start,
        seconds=seconds,
        is_estimate=True,
    )


def _ops(timeline: KernelTimeline, origins: Mapping[str, Origin], start: int, time_ns: float) -> Iterator[ProfiledOp]:
    count = len(timeline.calls)
    made, gone = [0] * count, [0] * (count + 1)
    for life in timeline.lives:
        made[life.created] += life.size_bytes
        gone[life.freed] += life.size_bytes
    live = accumulate(after - before for after, before in zip(made, (0, *gone), strict=False))
    for place, (call, now) in enumerate(zip(timeline.calls, live, strict=True)):
        workspace = max(0, call.live_bytes - timeline.resident_bytes - now)
        yield ProfiledOp(
            target=call.name,
            module=_module(call.origins, origins),
            phase=_phase(call, origins),
            time_ns=time_ns,
            allocated_bytes=made[place] + workspace,
            freed_bytes=gone[place] + workspace,
            workspace_bytes=workspace,
            live_bytes=start + now,
        )


def _storages(timeline: KernelTimeline, origins: Mapping[str, Origin]) -> Iterator[ProfiledStorage]:
    count = len(timeline.calls)
    backward = next((place for place, call in enumerate(timeline.calls) if call.phase is Phase.BACKWARD), count)
    for life in timeline.lives:
        waits = life.created < backward <= life.freed
        is_gradient = life.created >= backward and life.freed == count
        yield ProfiledStorage(
            kind=MemoryClass.GRADIENT if is_gradient else MemoryClass.ACTIVATION,
            size_bytes=life.size_bytes,
            name=life.made_by,
            module=_module(timeline.calls[life.created].origins, origins),
            created=life.created,
            freed=life.freed,
            last_forward_use=life.created if life.created < backward else BEFORE,
            first_backward_use=backward if waits and life.freed < count else BEFORE,
        )


def _module(names: tuple[str, ...], origins: Mapping[str, Origin]) -> str:
    return next((origins[name].module for name in reversed(names) if name in origins), "")


def _phase(call: KernelCall, origins: Mapping[str, Origin]) -> Phase:
    """Nodes that are not the graph's own have names that the user's code gave them: they are of the forward."""
    is_own = any(name in origins and origins[name].in_backward for name in call.origins)
    return Phase.RECOMPUTE if call.phase is Phase.BACKWARD and call.origins and not is_own else call.phase
