"""What the caller holds besides the storages that go in and out of graphs, from what was measured in the gaps.

In: the calls of a step as they ran once, the storages that were followed, and the bytes in memory in each gap. The
graphs' own part of those bytes is known from the schedules that ran; the rest is the caller's: what eager code saves
for its backward, sums of gradients, casts that autocast keeps. Out: an `Outside` in which that rest is a staircase of
values, so that the step as it ran would be predicted to the byte at every gap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from remat.core.graph import ValueId
from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import NO_VALUE, simulate
from remat.pytorch.graph.capture import Captured
from remat.pytorch.run.compose import BEFORE, Call, Outside, Passed, Source, Step, compose


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes in memory in one gap, beyond what was there when the step's first graph started."""

    peak_bytes: int
    end_bytes: int


def settle(
    calls: Sequence[Call],
    passed: Sequence[Passed],
    before_bytes: int,
    gaps: Sequence[Gap],
    schedules: Sequence[Schedule],
) -> Outside:
    """Attribute what was measured; where `gaps` ends early, what is held then is taken to stay.

    `before_bytes` is what the step had made and kept when its first graph started.
    """
    count = 2 * len(calls)
    step = compose(calls, Outside(tuple(passed), (0,) * count))
    joined = step.join(schedules)
    during, after = _known_bytes(step, joined)
    made = sum(item.size_bytes for item in passed if item.born == BEFORE)
    levels = [max(0, before_bytes - made)]
    levels += [max(0, before_bytes + gap.end_bytes - known) for gap, known in zip(gaps, after, strict=False)]
    levels += [levels[-1]] * (count + 1 - len(levels))
    # What appears and what goes are both there for a moment, as in `Passed`.
    held = [max(pair) for pair in pairwise(levels)]
    measured = zip(gaps, during, held, strict=False)
    needs = [max(0, before_bytes + gap.peak_bytes - known - own) for gap, known, own in measured]
    kept = [_kept_bytes(step, joined, number) for number in range(len(step.gaps))]
    most = [max(0, before_bytes + gap.peak_bytes - known) for gap, known in zip(gaps, kept, strict=False)]
    return Outside((*passed, *_staircase(levels)), (*needs, *[0] * (count - len(needs))), tuple(most))


def last_gaps(step: Step, schedule: Schedule, sources: Iterable[Source]) -> dict[Source, int]:
    """The last gap before each of these values dies, where `schedule` runs."""
    problem = Problem(step.graph, step.costs, budget_bytes=0)
    ends = simulate(problem, schedule).last_uses
    gaps = sorted(schedule.steps.index(gap) for gap in step.gaps)
    found = {}
    for call, value in sources:
        graph = step.calls[call].captured.graph
        maker = graph.producers()[value]
        # What leaves its graph is made once.
        place = schedule.steps.index(step.placed[call][maker])
        end = ends[place][graph.ops[maker].outputs.index(value)]
        found[call, value] = bisect_right(gaps, end) - 1
    return found


def level_bytes(outside: Outside, gap: int) -> int:
    """What the caller made itself and holds when `gap` ends."""
    return sum(item.size_bytes for item in outside.passed if item.source is None and item.born <= gap < item.held)


def _known_bytes(step: Step, schedule: Schedule) -> tuple[list[int], list[int]]:
    """For each gap, bytes of the values in memory during it and after it."""
    problem = Problem(step.graph, step.costs, budget_bytes=0)
    timeline = simulate(problem, schedule)
    live = timeline.live_bytes
    size, workspace = step.costs.size_bytes, step.costs.workspace_bytes
    during, after = [], []
    for number, gap in enumerate(step.gaps):
        place = schedule.steps.index(gap)
        during.append(live[place] - _dropped_bytes(step, schedule, number))
        following = schedule.steps[place + 1] if place + 1 < len(live) else None
        if following is None:
            after.append(sum(size[value] for value in step.graph.outputs))
        else:
            # What is written into an input is not new.
            is_new = timeline.overwritten[place + 1] == NO_VALUE
            new = sum(size[value] for value in step.graph.ops[following].outputs) if is_new else 0
            after.append(live[place + 1] - workspace[following] - new)
    return during, after


def _kept_bytes(step: Step, schedule: Schedule, gap: int) -> int:
    """What forwards have made and still hold while the caller's code runs in a gap."""
    size, ops = step.costs.size_bytes, step.graph.ops
    forward = {
        places[op] for call, places in zip(step.calls, step.placed, strict=True) for op in range(call.captured.boundary)
    }
    place = schedule.steps.index(step.gaps[gap])
    ends = simulate(Problem(step.graph, step.costs, budget_bytes=0), schedule).last_uses[:place]
    made = (
        zip(ops[op].outputs, last, strict=True) for op, last in zip(schedule.steps, ends, strict=False) if op in forward
    )
    held = sum(size[value] for values in made for value, end in values if end >= place)
    return held - sum(_dropped_bytes(step, schedule, gap, read=read) for read in (True, False))


def _dropped_bytes(step: Step, schedule: Schedule, gap: int, *, read: bool = True) -> int:
    """Updates of inputs that die after they were copied, before any code of the caller runs: a schedule that needs
    them later has them beside it.
    """
    if gap >= len(step.calls):
        return 0
    ends = last_gaps(step, schedule, [(gap, value) for value in updates(step.calls[gap].captured, read=read)])
    return sum(step.calls[gap].costs.size_bytes[value] for (_, value), end in ends.items() if end == gap)


def updates(captured: Captured, *, read: bool) -> list[ValueId]:
    """What inputs become when forward has ended: where any op reads it, or where none does, as a batch norm's new
    statistics.
    """
    graph, readers = captured.graph, captured.graph.consumers()
    dropped = (value for value in graph.ops[captured.boundary].inputs if value not in graph.outputs)
    return [value for value in dropped if read is any(reader != captured.boundary for reader in readers[value])]


def _staircase(levels: Sequence[int]) -> Iterator[Passed]:
    """Values that add up to `levels`, the first of which is before the first graph: one for each step up."""
    floor = 0
    for level in sorted({level for level in levels if level}):
        is_up = [height >= level for height in levels]
        for place, up in enumerate(is_up):
            if up and (place == 0 or not is_up[place - 1]):
                end = next((later for later in range(place, len(levels)) if not is_up[later]), len(levels))
                yield Passed(level - floor, born=place + BEFORE, held=end + BEFORE)
        floor = level
