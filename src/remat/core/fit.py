"""How an amount grows with a size: laws fitted to a few points, with what they are worth.

In: sizes (batches, lengths) and what was seen at each. Out: a `Law`, a sum of 1, x and x² with no negative part, whose
terms are chosen by leaving out one point at a time and predicting it from the others; or an `ExactLaw`, a polynomial
that passes through every point, where there is one and at least one point to spare. How far off the predictions of left
out points were is the error that a law states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

TERMS: Final = ((0,), (1,), (0, 1), (2,), (0, 2), (1, 2), (0, 1, 2))
"""Powers of x in each kind of law, simplest first."""
BETTER_FACTOR = 0.9
"""A law with x² must predict left out points this much better than one without: carried on, it grows fast."""
ROUNDING_SHARE = 1e-9
"""A law that misses by no more than this share is taken as it is: what is left is rounding."""
ZERO_TOLERANCE = 1e-9
"""Amounts up to this count as none: far below a nanosecond or a byte."""
SMALLEST_SHARE = 0.01
"""Amounts below this share of the largest are not fitted to the same relative error."""


@dataclass(frozen=True, slots=True)
class Law:
    """`constant + linear · x + quadratic · x²`, and the points behind it."""

    coefficients: tuple[float, float, float]
    sizes: tuple[float, ...]
    amounts: tuple[float, ...]
    left_out: tuple[float, ...]
    """What the other points predict for each point."""
    degree: int = 2
    """The highest power that was allowed."""

    def at(self, size: float) -> float:
        constant, linear, quadratic = self.coefficients
        return constant + linear * size + quadratic * size * size

    def error(self, size: float) -> float:
        """By which share of the amount the law may be off at `size`; see `sum_error`."""
        return sum_error((self,), size)


@dataclass(frozen=True, slots=True)
class ExactLaw:
    """A polynomial with whole amounts at the sizes it was made from: coefficients over one denominator."""

    numerators: tuple[int, ...]
    denominator: int

    def at(self, size: int) -> int:
        total = 0
        for numerator in reversed(self.numerators):
            total = total * size + numerator
        # Rounded up: a byte too many is safe, a byte too few is not.
        return -(-total // self.denominator)


def fit(sizes: Sequence[float], amounts: Sequence[float], *, degree: int = 2) -> Law:
    """The law up to x to the `degree` that predicts left out points best; needs two different sizes."""
    if len(set(sizes)) < 2 or len(sizes) != len(amounts):
        raise ValueError(f"A law needs amounts at two sizes or more, found {len(amounts)} at {len(set(sizes))} sizes.")
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(amounts, dtype=np.float64)
    best: tuple[float, tuple[int, ...], NDArray[np.float64]] | None = None
    for terms in TERMS:
        if terms[-1] > degree or len(terms) >= len(x):
            continue
        guesses = _left_out(x, y, terms)
        missed = float(np.sqrt(np.mean(((guesses - y) * _weights(y)) ** 2)))
        if best is None or (
            best[0] > ROUNDING_SHARE and missed < best[0] * (BETTER_FACTOR if terms[-1] > best[1][-1] > 0 else 1)
        ):
            best = (missed, terms, guesses)
    assert best is not None
    coefficients = _solve(x, y, best[1])
    return Law(
        (float(coefficients[0]), float(coefficients[1]), float(coefficients[2])),
        tuple(map(float, x)),
        tuple(map(float, y)),
        tuple(map(float, best[2])),
        degree,
    )


def fit_exactly(sizes: Sequence[int], amounts: Sequence[int], *, degree: int = 2) -> ExactLaw | None:
    """The polynomial of the smallest degree through every point; None where a point is not left to check it."""
    for count in range(1, min(degree + 1, len(sizes) - 1) + 1):
        coefficients = _interpolate(sizes[:count], amounts[:count])
        denominator = math.lcm(*(coefficient.denominator for coefficient in coefficients))
        law = ExactLaw(tuple(int(coefficient * denominator) for coefficient in coefficients), denominator)
        if all(law.at(size) == amount for size, amount in zip(sizes, amounts, strict=True)):
            return law
    return None


def sum_error(laws: Sequence[Law], size: float) -> float:
    """By which share the sum of laws fitted to the same sizes may be off at `size`.

    The mean (root of squares) of what the sum missed at left out points. Beyond the largest size that was seen, as much
    again with every doubling, and where x² was allowed in proportion to the size too: mistaking x for x² costs that.
    """
    if not laws:
        return 0.0
    sizes = laws[0].sizes
    totals = [sum(law.amounts[point] for law in laws) for point in range(len(sizes))]
    guesses = [sum(law.left_out[point] for law in laws) for point in range(len(sizes))]
    shares = [
        abs(guess - total) / total for guess, total in zip(guesses, totals, strict=True) if total > ZERO_TOLERANCE
    ]
    missed = math.sqrt(sum(share * share for share in shares) / len(shares)) if shares else 0.0
    beyond = max(1.0, size / max(sizes))
    return missed * (1 + math.log2(beyond)) * beyond ** max(0, laws[0].degree - 1)


def _left_out(x: NDArray[np.float64], y: NDArray[np.float64], terms: tuple[int, ...]) -> NDArray[np.float64]:
    guesses = np.zeros_like(y)
    for point in range(len(x)):
        others = np.arange(len(x)) != point
        guesses[point] = np.polynomial.polynomial.polyval(x[point], _solve(x[others], y[others], terms))
    return guesses


def _solve(x: NDArray[np.float64], y: NDArray[np.float64], terms: tuple[int, ...]) -> NDArray[np.float64]:
    """Least squares of relative errors over the terms, none of them negative: the best of all subsets that is so."""
    weights = _weights(y)
    best, found = math.inf, np.zeros(3)
    for count in reversed(range(len(terms) + 1)):
        for chosen in combinations(terms, count):
            powers = np.stack([x**term for term in chosen], axis=1) if chosen else np.zeros((len(x), 0))
            # Columns of one scale, because x² of a large batch would drown the constant.
            scale = np.max(np.abs(powers * weights[:, None]), axis=0, initial=ZERO_TOLERANCE)
            solved = np.linalg.lstsq(powers * weights[:, None] / scale, y * weights, rcond=None)[0] / scale
            missed = float(np.sum(((powers @ solved - y) * weights) ** 2))
            if np.all(solved >= 0) and missed < best:
                best, found = missed, np.zeros(3)
                found[list(chosen)] = solved
        if math.isfinite(best) and count == len(terms):
            break  # With every term allowed and none negative, nothing fits better.
    return found


def _weights(y: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = float(np.max(np.abs(y), initial=0.0))
    return np.ones_like(y) if largest <= ZERO_TOLERANCE else 1 / np.maximum(np.abs(y), SMALLEST_SHARE * largest)


def _interpolate(sizes: Sequence[int], amounts: Sequence[int]) -> list[Fraction]:
    """Coefficients, constant first, of the polynomial through the points (Newton's divided differences)."""
    differences = [Fraction(amount) for amount in amounts]
    for level in range(1, len(sizes)):
        for place in reversed(range(level, len(sizes))):
            differences[place] = (differences[place] - differences[place - 1]) / (sizes[place] - sizes[place - level])
    coefficients = [Fraction(0)]
    for place in reversed(range(len(sizes))):
        shifted = [Fraction(0), *coefficients]
        for power, coefficient in enumerate(coefficients):
            shifted[power] -= sizes[place] * coefficient
        coefficients = shifted
        coefficients[0] += differences[place]
    while len(coefficients) > 1 and coefficients[-1] == 0:
        coefficients.pop()
    return coefficients
