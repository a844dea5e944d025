"""HiGHS, from `remat[solvers]`: the default. Large programs get a process of their own, so that time limits hold."""

from __future__ import annotations

from remat.core.search.limits import Limits
from remat.solvers.backends.linear_highs import minimise, require_highs
from remat.solvers.backends.program import NO_POINT, MixedIntegerProgram, Point, ProgramAnswer
from remat.solvers.backends.watchdog import minimise_watched

WATCHED_COLUMNS = 20_000
"""Columns from which on HiGHS may miss its time limit by seconds."""


def solve_with_highs(
    program: MixedIntegerProgram, limits: Limits, start: Point = NO_POINT, *, relaxed: bool = False
) -> ProgramAnswer:
    require_highs()
    if len(program.cost) >= WATCHED_COLUMNS:
        return minimise_watched(program, limits, start, relaxed=relaxed)
    return minimise(program, limits, start, relaxed=relaxed)
