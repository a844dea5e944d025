"""Cases run in processes of their own, and one that hangs is a result like any other."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")

from tests.fuzz.modules import make_case
from tests.fuzz.pool import Request, run_cases


def test_case_that_takes_too_long_is_a_timeout_with_its_description() -> None:
    (result,) = run_cases([5], jobs=1, request=Request(timeout_s=-60.0))
    assert (result["seed"], result["verdict"]) == (5, "timeout")
    assert result["case"] == make_case(5).describe()


def test_no_case_begins_after_the_end() -> None:
    assert list(run_cases([1, 2], jobs=1, request=Request(), end=time.monotonic() - 1)) == []


@pytest.mark.slow
def test_results_come_back_from_a_process() -> None:
    results = list(run_cases(range(2), jobs=1, request=Request()))
    assert [result["seed"] for result in results] == [0, 1]
    assert all(result["trials"] for result in results)
