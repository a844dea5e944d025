"""When the largest storages of a step come and go, and how long they lie unused between forward and backward.

In: a `Report`. Out: panels of rows, largest storages only, in the order in which they are first made. Where both steps
are replays of one plan, a row shows the same value in both: what was dropped and made again is seen as a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remat.core.results.profile import BEFORE, MemoryClass, Phase, ProfiledStorage, StepProfile
from remat.report.contents.gathered import Report
from remat.report.contents.samples import clock

ROWS = 40


@dataclass(frozen=True, slots=True)
class Life:
    """One storage on the step's clock; the idle stretch is empty where it does not wait for backward."""

    start_ns: float
    idle_from_ns: float
    idle_to_ns: float
    end_ns: float
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    module: str
    kind: MemoryClass
    size_bytes: int
    recompute_ns: float
    before: tuple[Life, ...]
    after: tuple[Life, ...]
    """Empty where only one step is shown."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    rows: tuple[Row, ...]
    made_count: int
    """Values that the step makes, shown or not."""
    paired: bool
    """Each row shows the value in both steps."""


def lifetimes(report: Report, rows: int = ROWS) -> tuple[Panel, ...]:
    before, after = report.before, report.after
    if before is not None and after is not None and _is_replay(before) and _is_replay(after):
        return (_panel("", _grouped(before), before, after, rows, paired=True),)
    titles = [title if len(report.steps) > 1 else "" for title, _ in report.steps]
    return tuple(
        _panel(title, _grouped(step), step, None, rows, paired=False)
        for title, (_, step) in zip(titles, report.steps, strict=True)
    )


def idle_share(step: StepProfile) -> float:
    """The share of the step for which an average waiting byte lies unused."""
    waiting = [item for item in step.storages if item.waits_for_backward and item.kind is MemoryClass.ACTIVATION]
    starts, total = clock(step), sum(item.size_bytes for item in waiting)
    if not total or not starts[-1]:
        return 0.0
    idle = sum(
        item.size_bytes * (life.idle_to_ns - life.idle_from_ns) for item in waiting for life in [_life(item, starts)]
    )
    return idle / total / starts[-1]


def _is_replay(step: StepProfile) -> bool:
    return all(item.value != BEFORE for item in step.storages if item.created != BEFORE)


def _grouped(step: StepProfile) -> dict[int, list[ProfiledStorage]]:
    """Versions of one value together; a storage that is no version of anything stands alone."""
    groups: dict[int, list[ProfiledStorage]] = {}
    for number, item in enumerate(step.storages):
        if item.created != BEFORE and item.size_bytes:
            groups.setdefault(item.value if item.value != BEFORE else -2 - number, []).append(item)
    return groups


def _panel(
    title: str,
    groups: dict[int, list[ProfiledStorage]],
    before: StepProfile,
    after: StepProfile | None,
    count: int,
    *,
    paired: bool,
) -> Panel:
    starts = clock(before)
    later = _grouped(after) if after is not None else {}
    # Of equal sizes, what lies unused longest: it is what a plan drops first.
    largest = sorted(groups, key=lambda key: (-groups[key][0].size_bytes, -_wait(groups[key][0], starts)))[:count]
    shown = sorted(largest, key=lambda key: groups[key][0].created)
    rows = tuple(_row(groups[key], before, later.get(key, []), after) for key in shown)
    return Panel(title, rows, len(groups), paired)


def _wait(item: ProfiledStorage, starts: Sequence[float]) -> float:
    life = _life(item, starts)
    return life.idle_to_ns - life.idle_from_ns


def _row(
    first: list[ProfiledStorage], before: StepProfile, later: list[ProfiledStorage], after: StepProfile | None
) -> Row:
    item = first[0]
    return Row(
        name=item.name,
        module=item.module,
        kind=item.kind,
        size_bytes=item.size_bytes,
        recompute_ns=item.recompute_ns,
        before=_lives(first, before),
        after=_lives(later, after) if after is not None else (),
    )


def _lives(items: Sequence[ProfiledStorage], step: StepProfile) -> tuple[Life, ...]:
    starts = clock(step)
    return tuple(_life(item, starts, step.ops[item.created].phase is Phase.RECOMPUTE) for item in items)


def _life(item: ProfiledStorage, starts: Sequence[float], recomputed: bool = False) -> Life:
    count = len(starts) - 1
    start, end = starts[max(0, item.created)], starts[min(item.freed + 1, count)]
    if not item.waits_for_backward:
        return Life(start, end, end, end, recomputed)
    used = max(item.created, item.last_forward_use) + 1
    return Life(start, starts[min(used, count)], starts[max(used, item.first_backward_use)], end, recomputed)
