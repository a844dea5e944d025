"""Dynamic program over a chain of blocks with unequal times and sizes (rotor; Beaumont et al. 2019).

Forward is cut where one large value crosses. Each block is kept whole, or only what it passes on is kept, and blocks
may be recomputed several times, nested. Exact among persistent schedules (what was stored stays until backward has used
it) where forward is a chain of at most 64 ops, to the rounding of memory to 500 slots. Elsewhere blocks of
several ops are kept or dropped as one and their bytes are estimated from above, so that it is a heuristic.
Recomputations that the budget turns out not to need are taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.block_chain import block_chain_of
from remat.solvers.schedule.blocks import find_chain
from remat.solvers.schedule.keep import turning_point
from remat.solvers.strategies.rotor_table import persistent_schedules


@final
@dataclass(frozen=True, slots=True)
class ChainDp(Strategy):
    name: str = "chain_dp"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        end = turning_point(problem) - 1
        cuts = {*find_chain(problem, min_ops=1).cuts, end}
        yield from persistent_schedules(problem, block_chain_of(problem, cuts))
