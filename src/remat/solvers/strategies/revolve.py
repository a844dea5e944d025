"""Optimal binomial checkpointing of a chain of known length (Griewank & Walther 2000).

Forward is contracted to a chain of blocks, all taken to be alike. With c slots for inputs of blocks, block 0's apart,
t(n, c) = min over k of k + t(n-k, c-1) + t(k, c) counts the block runs that bring backward through n blocks: run to
block k, store its input, go back through the rest, then through the first k with the slot free again. The number of
slots is searched; the simulated peak decides. Fewest runs for its slots on uniform chains. `treeverse`
divides by a rule instead of a table, and may run more where the length is not a binomial number.
"""

from __future__ import annotations

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
class Revolve(Strategy):
    name: str = "revolve"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        chain = block_chain_of(problem, find_chain(problem, min_ops=1).cuts)
        length = len(chain.ends)
        table = runs(length, length)
        yield from climb(
            problem, range(length), lambda slots: checkpoint_schedule(chain, stored(table, length, slots)), grid=24
        )


def runs(length: int, slots: int) -> list[list[tuple[int, int]]]:
    """t(n, c) and the k that attains it, by n up to `length` and c up to `slots`."""
    table = [[(0, 0)] * (slots + 1) for _ in range(2)]
    for n in range(2, length + 1):
        row = [(n * (n - 1) // 2, n - 1)]
        table.append(row)
        for c in range(1, slots + 1):
            row.append(min((k + table[n - k][c - 1][0] + (table[k][c][0]), k) for k in range(1, n)))
    return table


def stored(table: list[list[tuple[int, int]]], length: int, slots: int) -> list[frozenset[int]]:
    """The blocks whose inputs are stored when backward of each block begins."""
    result = [frozenset[int]() for _ in range(length)]
    stack = [(0, length, slots, frozenset[int]())]
    while stack:
        first, n, c, held = stack.pop()
        k = table[n][c][1]
        if n <= 1 or not c:
            result[first : first + n] = [held] * n
        else:
            stack.append((first, k, c, held))
            stack.append((first + k, n - k, c - 1, held | {first + k}))
    return result
