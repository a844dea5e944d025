"""The dynamic program of `chain_dp` on trees: forward is cut anywhere, and a checkpoint is all that crosses there.

With several branches joined, what crosses a place inside one branch is that branch's value and the results of the
branches before it; a value that crosses two places in a row is stored once, and is dropped once no block that is
left reads it. Where forward is a tree (each value is read by one forward op) of at most 64 ops listed branch by branch,
it is the best schedule that keeps what it stored until backward has used it, but for two roundings: memory comes in 500
slots, and the bytes of a run past several branches are estimated from above. Other graphs are cut at up to 64 narrow
places, and it is a heuristic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.block_chain import block_chain_of
from remat.solvers.schedule.blocks import find_narrow_cuts
from remat.solvers.strategies.rotor_table import persistent_schedules


@final
@dataclass(frozen=True, slots=True)
class TreeDp(Strategy):
    name: str = "tree_dp"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        yield from persistent_schedules(problem, block_chain_of(problem, find_narrow_cuts(problem)))
