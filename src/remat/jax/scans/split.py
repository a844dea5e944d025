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
        count = min(body.shape.length, int(max(0.0, left) // more))
        if count == 0 or not _is_whole(chosen[site], body.frontier[place + 1]):
            continue
        left -= count * more
        rich, lean = IterationRun(count, body.frontier[place]), body.shape.length - count
        chosen[site] = (rich, IterationRun(lean, body.frontier[place + 1])) if lean else (rich,)
    return chosen


def _is_whole(runs: tuple[IterationRun, ...], plan: BodyPlan) -> bool:
    """Whether all iterations have come as far as this plan."""
    return len(runs) == 1 and runs[0].plan is plan


def saved_bytes(runs: tuple[IterationRun, ...]) -> int:
    return sum(run.count * run.plan.saved_bytes for run in runs)
