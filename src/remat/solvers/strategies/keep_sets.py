"""What the known strategies keep from forward to backward, for portfolios that start from all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from remat.core.problem import Problem
from remat.solvers.schedule.blocks import find_chain, kept_at
from remat.solvers.strategies.selective import kept_values


def keep_sets(problem: Problem) -> Iterator[tuple[str, frozenset[int]]]:
    """The name of each strategy and the values that it keeps."""
    yield "selective", kept_values(problem)
    chain = find_chain(problem)
    strides = {1, 2, max(1, math.isqrt(len(chain.cuts)))}
    strides |= {2**power for power in range(2, len(chain.cuts).bit_length())}
    for every in sorted(strides):
        yield f"every {every} blocks", kept_at(chain, every)
