"""A step thinned to what a screen can show: some ops stand for their neighbours, and none of the peaks is lost.

In: a `StepProfile`. Out: `Samples`, one for each stretch of ops of equal length: the op of the stretch that has most in
memory, what each class holds then, and the largest storages. Time starts at 0 with the step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import accumulate

from remat.core.results.profile import MemoryClass, Phase, StepProfile

POINTS = 1200
LARGEST_COUNT = 5


@dataclass(frozen=True, slots=True)
class Sample:
    position: int
    """The op that stands for the stretch."""
    start_ns: float
    """When the stretch begins."""
    largest: tuple[int, ...]
    """The largest storages in memory while it runs, by their number in the profile."""


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """Neighbouring ops of one phase."""

    phase: Phase
    start_ns: float
    end_ns: float


@dataclass(frozen=True, slots=True)
class Samples:
    rows: tuple[Sample, ...]
    by_class: dict[MemoryClass, tuple[int, ...]]
    """Bytes of each class that is there at all, in stacking order, one for each row."""
    peak: int
    """The row with the step's peak, -1 where there are no ops."""
    starts_ns: tuple[float, ...]
    """When each op of the step begins, and last the step's end."""


def clock(step: StepProfile) -> tuple[float, ...]:
    """When each op begins, and last when the step ends; ops without a time take one unit each.

    Following a step slows its ops down, so they are drawn in at the scale of the step's own time.
    """
    times = [op.time_ns for op in step.ops]
    if not any(times):
        times = [1.0] * len(times)
    elif step.seconds > 0 and not step.is_estimate:
        factor = step.seconds * 1e9 / sum(times)
        times = [time * factor for time in times]
    return (0.0, *accumulate(times))


def sample(step: StepProfile, points: int = POINTS) -> Samples:
    starts, during = clock(step), step.during_bytes
    count = min(points, len(during))
    edges = [index * len(during) // count for index in range(count + 1)] if count else []
    chosen = [max(range(left, right), key=during.__getitem__) for left, right in zip(edges, edges[1:], strict=False)]
    largest = _largest(step, chosen)
    rows = tuple(
        Sample(position, starts[left], top) for position, left, top in zip(chosen, edges, largest, strict=False)
    )
    lines = {kind: tuple(line[position] for position in chosen) for kind, line in step.bytes_by_class().items()}
    peak = max(range(len(chosen)), key=lambda row: during[chosen[row]], default=-1)
    return Samples(rows, {kind: line for kind, line in lines.items() if any(line)}, peak, starts)


def phases(step: StepProfile, points: int = POINTS) -> tuple[PhaseRun, ...]:
    """The step as runs of one phase; of more than `points`, the shortest are swallowed by what runs before them."""
    runs = _runs(step)
    if len(runs) <= points:
        return tuple(runs)
    shortest = sorted(run.end_ns - run.start_ns for run in runs)[-points]
    kept: list[PhaseRun] = []
    for run in runs:
        if kept and (run.end_ns - run.start_ns < shortest or run.phase is kept[-1].phase):
            kept[-1] = PhaseRun(kept[-1].phase, kept[-1].start_ns, run.end_ns)
        else:
            kept.append(run)
    return tuple(kept)


def _runs(step: StepProfile) -> list[PhaseRun]:
    starts = clock(step)
    runs: list[PhaseRun] = []
    for number, op in enumerate(step.ops):
        if runs and runs[-1].phase is op.phase:
            runs[-1] = PhaseRun(op.phase, runs[-1].start_ns, starts[number + 1])
        else:
            runs.append(PhaseRun(op.phase, starts[number], starts[number + 1]))
    return runs


def _largest(step: StepProfile, positions: list[int]) -> list[tuple[int, ...]]:
    """The largest live storages at each of the rising `positions`, kept sorted while storages come and go."""
    born = sorted(range(len(step.storages)), key=lambda number: step.storages[number].created, reverse=True)
    dying = sorted(range(len(step.storages)), key=lambda number: step.storages[number].freed, reverse=True)
    live: list[tuple[int, int]] = []
    result: list[tuple[int, ...]] = []
    for position in positions:
        while born and step.storages[born[-1]].created <= position:
            number = born.pop()
            insort(live, (-step.storages[number].size_bytes, number))
        while dying and step.storages[dying[-1]].freed < position:
            number = dying.pop()
            del live[bisect_left(live, (-step.storages[number].size_bytes, number))]
        result.append(tuple(number for size, number in live[:LARGEST_COUNT] if size))
    return result
