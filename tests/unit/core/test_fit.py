"""Laws over a size: exact ones are found again, noisy ones state how far they are off, none is negative."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat.core.fit import ExactLaw, Law, fit, fit_exactly, sum_error

SIZES = (4, 8, 12, 17)
coefficients = st.tuples(*[st.integers(0, 10**6)] * 3)


def amounts_of(law: tuple[float, ...], sizes: tuple[int, ...] = SIZES) -> list[float]:
    return [sum(part * size**power for power, part in enumerate(law)) for size in sizes]


@given(coefficients, st.integers(1, 10_000))
def test_exact_law_is_found_again_and_holds_at_every_size(law: tuple[int, ...], size: int) -> None:
    found = fit_exactly(SIZES, [int(amount) for amount in amounts_of(law)])
    assert found is not None
    assert found.at(size) == sum(part * size**power for power, part in enumerate(law))


@given(coefficients)
def test_law_without_noise_is_fitted_closely_and_says_so(law: tuple[int, ...]) -> None:
    found = fit(SIZES, amounts_of(law))
    for size in (2, 10, 40):
        truth = amounts_of(law, (size,))[0]
        assert found.at(size) == pytest.approx(truth, rel=0.02 + found.error(size), abs=1e-6)


@given(st.lists(st.floats(0, 1e12), min_size=4, max_size=4), st.floats(0, 1e6))
def test_no_law_is_ever_negative(amounts: list[float], size: float) -> None:
    found = fit(SIZES, amounts)
    assert all(part >= 0 for part in found.coefficients)
    assert math.isfinite(found.at(size)) and found.at(size) >= 0
    assert math.isfinite(found.error(size)) and found.error(size) >= 0


def test_points_off_every_polynomial_have_no_exact_law() -> None:
    assert fit_exactly(SIZES, (1, 5, 2, 9)) is None
    assert fit_exactly((4, 8), (1, 2)) is None, "a line through two points has no point left to check it"


def test_exact_law_of_degree_one_refuses_a_square() -> None:
    squares = [size * size for size in SIZES]
    assert fit_exactly(SIZES, squares, degree=1) is None
    assert fit_exactly(SIZES, squares, degree=2) == ExactLaw((0, 0, 1), 1)


def test_exact_law_rounds_up_between_its_points() -> None:
    law = fit_exactly((2, 4, 6), (1, 2, 3))
    assert law is not None
    assert law.at(5) == 3


def test_degree_one_never_grows_faster_than_its_size() -> None:
    law = fit(SIZES, [size**2 for size in SIZES], degree=1)
    assert law.coefficients[2] == 0


def test_one_size_is_not_enough() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit((4, 4), (1.0, 2.0))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_stated_error_of_a_sum_holds_most_of_the_time(degree: int, noise: float) -> None:
    """Many ops with laws of their own, all measured with noise, predicted at three times the largest size."""
    holds = [_sum_is_within_error(seed, degree, noise) for seed in range(40)]
    assert sum(holds) >= 0.8 * len(holds)


def _sum_is_within_error(seed: int, degree: int, noise: float) -> bool:
    rng, size = random.Random(seed), 3 * SIZES[-1]
    # A busy machine slows a whole run: every point has a common factor too.
    slow = [rng.lognormvariate(0, noise) for _ in SIZES]
    truth, laws = 0.0, []
    for _ in range(20):
        law = [rng.uniform(0, 100), rng.uniform(0, 50), rng.uniform(0, 5) if degree == 2 else 0.0]
        measured = zip(amounts_of(tuple(law)), slow, strict=True)
        laws.append(
            fit(SIZES, [amount * pace * rng.lognormvariate(0, noise) for amount, pace in measured], degree=degree)
        )
        truth += amounts_of(tuple(law), (size,))[0]
    guess = sum(law.at(size) for law in laws)
    return abs(guess - truth) <= sum_error(laws, size) * truth


def test_error_grows_beyond_what_was_seen_and_not_within() -> None:
    law = fit(SIZES, (10.0, 25.0, 30.0, 60.0))
    assert law.error(5) == law.error(17) < law.error(34) < law.error(68)
    line = fit(SIZES, (10.0, 25.0, 30.0, 60.0), degree=1)
    assert line.error(34) == pytest.approx(2 * line.error(17))


def test_error_of_nothing_is_zero() -> None:
    assert sum_error((), 7) == 0.0
    assert fit(SIZES, (0.0, 0.0, 0.0, 0.0)) == Law((0.0, 0.0, 0.0), (4.0, 8.0, 12.0, 17.0), (0.0,) * 4, (0.0,) * 4)
