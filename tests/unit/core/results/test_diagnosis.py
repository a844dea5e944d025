"""A diagnosis says whether all is well, and how much is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.core.results.diagnosis import Diagnosis, Finding, FindingKind

HEALTHY = Diagnosis(
    name="model",
    budget_bytes=100,
    graphs=1,
    ops=10,
    saved_bytes=80,
    unplanned_bytes=20,
    same_bits=True,
    plain_peak_bytes=120,
    predicted_peak_bytes=99,
    measured_peak_bytes=99,
    captures=(1, 0, 0),
)


def found(kind: FindingKind) -> Finding:
    return Finding(kind, "Something.", "Do it.")


def test_share_is_of_what_plain_pytorch_keeps() -> None:
    assert HEALTHY.covered == 0.75
    assert replace(HEALTHY, saved_bytes=0, unplanned_bytes=0).covered == 1.0
    assert replace(HEALTHY, unplanned_bytes=100).covered == 0.0


def test_share_is_not_known_where_nobody_could_look() -> None:
    assert replace(HEALTHY, saved_bytes=None).covered is None
    assert replace(HEALTHY, unplanned_bytes=None).covered is None
    assert replace(HEALTHY, saved_bytes=None, graphs=0).covered == 0.0


def test_captures_after_the_first_step_are_counted() -> None:
    assert HEALTHY.recaptures == 0
    assert replace(HEALTHY, captures=(2, 1, 1)).recaptures == 2


@pytest.mark.parametrize("kind", FindingKind)
def test_warnings_and_captures_are_good_to_know_and_the_rest_is_a_problem(kind: FindingKind) -> None:
    assert HEALTHY.ok
    is_harmless = kind in (FindingKind.WARNING, FindingKind.RECAPTURED)
    assert replace(HEALTHY, findings=(found(kind),)).ok is is_harmless
