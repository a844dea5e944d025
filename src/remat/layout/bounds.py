"""Lower bounds on the height of any placement.

The load is the largest sum of sizes that are alive at one time. Where all offsets at that time are multiples of some
number, every buffer but the highest fills whole multiples of it, and the bound rises accordingly.
"""

from __future__ import annotations

from math import gcd

import numpy as np

from remat.layout.problem import LayoutProblem


def load(problem: LayoutProblem) -> int:
    """The largest sum of sizes alive at one time."""
    return _largest_sum(problem, [buffer.size for buffer in problem.buffers])


def lower_bound(problem: LayoutProblem) -> int:
    """No placement is lower than this."""
    step = gcd(*(buffer.alignment for buffer in problem.buffers))
    if step <= 1:
        return load(problem)
    whole = [-(-buffer.size // step) * step for buffer in problem.buffers]
    # The highest buffer ends where it ends; the least that can be wrong for any of them is taken off.
    spare = max(full - buffer.size for full, buffer in zip(whole, problem.buffers, strict=True))
    return max(load(problem), _largest_sum(problem, whole) - spare)


def _largest_sum(problem: LayoutProblem, amounts: list[int]) -> int:
    if not problem.buffers:
        return 0
    times = np.array([buffer.upper for buffer in problem.buffers] + [buffer.lower for buffer in problem.buffers])
    changes = np.array([-amount for amount in amounts] + amounts, dtype=np.int64)
    # A stable sort keeps deaths, which stand first, before births at the same time.
    return int(np.cumsum(changes[np.argsort(times, kind="stable")]).max())
