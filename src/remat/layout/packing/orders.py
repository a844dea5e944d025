"""In which order greedy solvers place buffers: the hardest first, by what makes a buffer hard.

Ties are broken by the other properties and at last by position, so that an order is the same in every run.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from remat.layout.problem import LayoutProblem


class Order(Enum):
    SIZE = "size"
    """The largest first."""
    LIFE = "life"
    """The longest-lived first."""
    AREA = "area"
    """The largest product of size and life first."""
    START = "start"
    """The earliest first, as an allocator would meet them."""
    LOAD = "load"
    """Those alive at the fullest times first, and of these the largest."""


def arrange(problem: LayoutProblem, order: Order) -> list[int]:
    """The numbers of the buffers in the order in which to place them."""
    buffers = problem.buffers
    if not buffers:
        return []
    lower = np.array([buffer.lower for buffer in buffers], dtype=np.int64)
    life = np.array([buffer.upper for buffer in buffers], dtype=np.int64) - lower
    size = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    keys = {
        Order.SIZE: (lower, -life, -size),
        Order.LIFE: (lower, -size, -life),
        Order.AREA: (lower, -size, -(size.astype(np.float64) * life)),
        Order.START: (-life, -size, lower),
        Order.LOAD: (lower, -life, -size, -_fullest(problem) if order is Order.LOAD else size),
    }
    return [int(number) for number in np.lexsort(keys[order])]


def _fullest(problem: LayoutProblem) -> np.ndarray:
    """For each buffer, the largest sum of sizes alive at one time of its life."""
    times = sorted({time for buffer in problem.buffers for time in (buffer.lower, buffer.upper)})
    lower = np.searchsorted(times, [buffer.lower for buffer in problem.buffers])
    upper = np.searchsorted(times, [buffer.upper for buffer in problem.buffers])
    size = np.array([buffer.size for buffer in problem.buffers], dtype=np.int64)
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, lower, size)
    np.add.at(change, upper, -size)
    return _range_maxima(np.cumsum(change), lower, upper)


def _range_maxima(values: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """The largest of `values` over each range: two overlapping stretches of a power of two cover it."""
    level = np.frexp(upper - lower)[1] - 1
    result = np.zeros(len(lower), dtype=np.int64)
    for power in range(int(level.max()) + 1):
        chosen = level == power
        result[chosen] = np.maximum(values[lower[chosen]], values[upper[chosen] - (1 << power)])
        values = np.maximum(values, np.append(values[1 << power :], np.zeros(min(1 << power, len(values)), np.int64)))
    return result
