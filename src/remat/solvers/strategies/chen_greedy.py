"""Segments cut by a memory threshold (Chen et al. 2016, their greedy algorithm), the threshold searched.

Walking forward, bytes of values are added up; where they pass the threshold and the chain of blocks can be cut, what
crosses is kept and the sum begins again. Everything between is recomputed, a segment at a time. Small thresholds keep
more; the largest that the chain tells apart keeps one segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.schedule.blocks import Chain, find_chain
from remat.solvers.schedule.keep import keep_schedule

THRESHOLDS = 24


@final
@dataclass(frozen=True, slots=True)
class ChenGreedy(Strategy):
    name: str = "chen_greedy"

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        chain, seen = find_chain(problem, min_ops=1), set[frozenset[int]]()
        weights = block_bytes(problem, chain)
        for number in range(THRESHOLDS):
            kept = chain.tail.union(*(chain.crossing[cut] for cut in segment_cuts(weights, threshold(weights, number))))
            if kept not in seen:
                seen.add(kept)
                yield keep_schedule(problem, kept)


def block_bytes(problem: Problem, chain: Chain) -> list[int]:
    """The bytes of all values of each block, the tail left out."""
    size, starts = problem.costs.size_bytes, (0, *(cut + 1 for cut in chain.cuts))
    stretches = zip(starts, chain.cuts, strict=False)
    ops = problem.graph.ops
    return [sum(size[value] for op in ops[start : end + 1] for value in op.outputs) for start, end in stretches]


def threshold(weights: list[int], number: int) -> float:
    """From the mean block to all blocks together, in equal ratios."""
    count = max(len(weights), 1)
    return sum(weights) / count * math.pow(count, number / (THRESHOLDS - 1))


def segment_cuts(weights: list[int], most: float) -> list[int]:
    """The blocks after which to cut so that segments hold about `most` bytes."""
    result, total = [], 0
    for number, weight in enumerate(weights):
        total += weight
        if total >= most:
            result.append(number)
            total = 0
    return result
