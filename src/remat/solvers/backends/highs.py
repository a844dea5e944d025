"""HiGHS, from `remat[solvers]`: the default. Large programs get a process of their own, so that time limits hold."""

from __future__ import annotations

from remat.solvers.backends.watchdog import minimise_watched
from remat.solvers.highs import minimise, require_highs
from remat.solvers.program import Answer, Limits, Program

WATCHED = 20_000
"""Columns from which on HiGHS may miss its time limit by seconds."""


def solve_with_highs(program: Program, limits: Limits, *, relaxed: bool = False) -> Answer:
    require_highs()
    if len(program.cost) >= WATCHED:
        return minimise_watched(program, limits, relaxed=relaxed)
    return minimise(
        program,
        relaxed=relaxed,
        time_limit_s=limits.time_limit_s,
        gap=limits.gap,
        seed=limits.seed,
        start=limits.start,
    )
