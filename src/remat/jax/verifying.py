"""Do two loss functions give the same results and gradients, up to rounding?

In: a plain and an optimized function, and arguments. Out: a `GradientCheck`. Both compute the same equations, but XLA
fuses them differently, so bits may differ: what is compared is the largest difference in each array, relative to the
largest number in it. Gradients that are zero but for rounding are compared with the largest of all gradients instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

SMALL = 1e-2
"""Of the largest gradient: arrays whose numbers are all smaller are compared with this.

The gradient of an attention's key bias is zero but for rounding. In plain jax, with and without `jax.jit`, it differs
by more than its own size, and by 1.4e-5 of a thousandth of the largest gradient: jax itself would be refused.
"""


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Whether two functions agree."""

    ok: bool
    worst: float
    """The largest relative difference."""
    differences: tuple[str, ...]
    """One sentence for each result or gradient that differs by more than was allowed."""


def verify(
    plain: Callable[..., Any],
    optimized: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> GradientCheck:
    """Results and gradients of both, under `jax.jit`."""
    left, right = (
        jax.jit(jax.value_and_grad(function, argnums=argnums, has_aux=has_aux))(*args, **kwargs)
        for function in (plain, optimized)
    )
    found = [*_compared(left[0], right[0], "result"), *_compared(left[1], right[1], "gradient")]
    wrong = tuple(f"{name} differs by {distance:.3g} of its size" for name, distance in found if distance > tolerance)
    return GradientCheck(not wrong, max((distance for _, distance in found), default=0.0), wrong)


def _compared(left: Any, right: Any, what: str) -> Iterator[tuple[str, float]]:
    paths = jax.tree_util.tree_leaves_with_path(left)
    pairs = [(path, np.asarray(a), np.asarray(b)) for (path, a), b in zip(paths, jax.tree.leaves(right), strict=True)]
    most = max((_largest(a) for _, a, _ in pairs), default=0.0)
    for path, a, b in pairs:
        scale = max(_largest(a), SMALL * most) or 1.0
        yield f"{what}{jax.tree_util.keystr(path)}", _distance(a, b) / scale


def _largest(array: np.ndarray[Any, Any]) -> float:
    return float(np.max(np.abs(np.nan_to_num(array)), initial=0.0))


def _distance(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Infinite where one is no number and the other is."""
    if left.shape != right.shape or not np.array_equal(np.isnan(left), np.isnan(right)):
        return float("inf")
    same = (left == right) | np.isnan(left)
    return _largest(np.where(same, 0, left - right))
