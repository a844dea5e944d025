"""Which iterations of which scan run under which plan.

In: bodies with their frontiers, and how many bytes all of their iterations may save together. Out: for each body, runs
of iterations with a plan each. The bytes go where they save most time; the last of them make a split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from remat.jax.scans.body import Body, BodyPlan

Site = TypeVar("Site")
MOST_PLANS = 3
"""Of one scan: each is a loop of its own in the compiled step."""


@dataclass(frozen=True, slots=True)
class IterationRun:
    """Neighbouring iterations under one plan."""

    count: int
    plan: BodyPlan


def split(bodies: Mapping[Site, Body], allowed_bytes: float) -> dict[Site, tuple[IterationRun, ...]]:
    """The fastest split within `allowed_bytes`; all leanest where even these need more."""
    left = allowed_bytes - sum(body.leanest.saved_bytes * body.shape.length for body in bodies.values())
    chosen: dict[Site, tuple[IterationRun, ...]] = {
        site: (IterationRun(body.shape.length, body.leanest),) for site, body in bodies.items()
    }
    steps = [
        (saved_ns / more_bytes, more_bytes, site, place)
        for site, body in bodies.items()
        for place in range(len(body.frontier) - 2, -1, -1)
        if (more_bytes := body.frontier[place].saved_bytes - body.frontier[place + 1].saved_bytes) > 0
        and (saved_ns := body.frontier[place + 1].time_ns - body.frontier[place].time_ns) >= 0
    ]
    # Along a hull, each step saves less time per byte than the one before it.
    for _, more, site, place in sorted(steps, key=lambda item: -item[0]):
        body = bodies[site]
        count = whole_loops(int(max(0.0, left) // more), body.shape.length)
        if count == 0 or not _is_whole(chosen[site], body.frontier[place + 1]):
            continue
        left -= count * more
        rich, lean = IterationRun(count, body.frontier[place]), body.shape.length - count
        chosen[site] = (rich, IterationRun(lean, body.frontier[place + 1])) if lean else (rich,)
    return _with_rest(bodies, chosen, left)


def in_one(bodies: Mapping[Site, Body], allowed_bytes: float) -> dict[Site, tuple[IterationRun, ...]]:
    """The same with one plan for all iterations of a scan: XLA needs least beside what it knows of a single loop."""
    left = allowed_bytes - sum(body.leanest.saved_bytes * body.shape.length for body in bodies.values())
    chosen: dict[Site, tuple[IterationRun, ...]] = {}
    for site, body in bodies.items():
        most = body.leanest.saved_bytes + max(0.0, left) / body.shape.length
        fitting = (plan for plan in (*body.frontier, *body.others) if plan.saved_bytes <= most)
        plan = min(fitting, key=lambda plan: plan.time_ns, default=body.leanest)
        left -= (plan.saved_bytes - body.leanest.saved_bytes) * body.shape.length
        chosen[site] = (IterationRun(body.shape.length, plan),)
    return chosen


def _with_rest(
    bodies: Mapping[Site, Body], chosen: dict[Site, tuple[IterationRun, ...]], left: float
) -> dict[Site, tuple[IterationRun, ...]]:
    """What is left is too little for one more step of any body; in one of them a third plan may use it."""
    options = [
        (found, site)
        for site, body in bodies.items()
        if (found := refined(body, chosen[site], saved_bytes(chosen[site]) + left)) is not chosen[site]
    ]
    if not options:
        return chosen
    best, site = min(options, key=lambda item: time_ns(item[0]) - time_ns(chosen[item[1]]))
    return {**chosen, site: best}


def refined(body: Body, runs: tuple[IterationRun, ...], allowed_bytes: float) -> tuple[IterationRun, ...]:
    """The same iterations with some under one more plan, where that is faster and fits; otherwise as they are."""
    best = runs
    for place, run in enumerate(runs) if len(runs) < MOST_PLANS else ():
        rest = saved_bytes(runs) - run.count * run.plan.saved_bytes
        for plan in (*body.frontier, *body.others):
            more = plan.saved_bytes - run.plan.saved_bytes
            if more <= 0 or plan.time_ns >= run.plan.time_ns or any(item.plan is plan for item in runs):
                continue
            count = whole_loops(int((allowed_bytes - rest - run.count * run.plan.saved_bytes) // more), run.count)
            if count <= 0:
                continue
            parts = (IterationRun(count, plan), IterationRun(run.count - count, run.plan))
            found = (*runs[:place], *(part for part in parts if part.count), *runs[place + 1 :])
            best = found if time_ns(found) < time_ns(best) else best
    return best


def whole_loops(count: int, length: int) -> int:
    """As many of `length` iterations, up to `count`, as leave none alone.

    A loop of one iteration is none to XLA: it writes the rows of stacks out of place then, and copies all of them.
    """
    if count >= length:
        return length
    found = count if length - count > 1 else count - 1
    return found if found > 1 else 0


def time_ns(runs: tuple[IterationRun, ...]) -> float:
    return sum(run.count * run.plan.time_ns for run in runs)


def _is_whole(runs: tuple[IterationRun, ...], plan: BodyPlan) -> bool:
    """Whether all iterations have come as far as this plan."""
    return len(runs) == 1 and runs[0].plan is plan


def saved_bytes(runs: tuple[IterationRun, ...]) -> int:
    return sum(run.count * run.plan.saved_bytes for run in runs)
