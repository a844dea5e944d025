"""Binomial checkpointing by recursive division (Griewank 1992).

Forward is contracted to a chain of blocks. With s slots (the input of the first block is in one of them) and depth d,
the most times a block may run again, a stretch of n blocks is divided after the first n·d/(s+d): the rest has one slot
less, the first part one run less. The depth is the least for which the chain is not longer than the binomial (s+d over
s), the number of slots is searched, and the simulated peak decides. Needs no table and is as good as `revolve` where
the length is such a binomial; `revolve` is never worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.block_chain import block_chain_of, checkpoint_schedule
from remat.solvers.schedule.blocks import find_chain
from remat.solvers.schedule.climb import climb


@final
@dataclass(frozen=True, slots=True)
class Treeverse(Strategy):
    name: str = "treeverse"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        chain = block_chain_of(problem, find_chain(problem, min_ops=1).cuts)
        slots = range(1, len(chain.ends) + 1)
        yield from climb(
            problem, slots, lambda count: checkpoint_schedule(chain, stored(len(chain.ends), count)), grid=24
        )


def stored(length: int, slots: int) -> list[frozenset[int]]:
    """The blocks whose inputs are stored when backward of each block begins, beside that of block 0."""
    depth = next(d for d in range(length + 1) if math.comb(slots + d, slots) >= length)
    result = [frozenset[int]() for _ in range(length)]
    stack = [(0, length, slots, depth, frozenset[int]())]
    while stack:
        first, n, s, d, held = stack.pop()
        if n <= 1 or s <= 1:
            result[first : first + n] = [held] * n
        else:
            k = min(n - 1, max(1, -(-n * d // (s + d))))
            stack.append((first, k, s, max(d - 1, 0), held))
            stack.append((first + k, n - k, s - 1, d, held | {first + k}))
    return result
