from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.unit.core.profiles import step_profile

from remat.core.results.profile import StepProfile
from remat.report.tables.profile import duration, profile_facts, profile_tables, summary


def test_summary_names_op_module_phase_and_what_waits() -> None:
    sentence = summary(step_profile(5))
    assert sentence.startswith("Peak 1.10 KiB during `aten.mm_backward` in `layers.4` (backward): 44% ")
    assert "44% activations that wait for backward" in sentence
    assert "The 5 activations that wait (500 B) took 25 ns to compute, 25% of the step" in sentence


def test_profile_without_ops_says_so() -> None:
    empty = StepProfile("net", "cpu", "2.13", (), (), 2048, 0.0)
    assert summary(empty) == "Nothing was computed; 2.00 KiB were in memory when the step began."
    assert profile_facts(empty, 3)["peak_op"] is None


def test_tables_name_modules_as_they_are() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in profile_tables(step_profile(5), 3):
        console.print(table)
    text = console.export_text()
    assert "layers.4" in text
    assert "and 2 more (--top)" in text


@pytest.mark.parametrize(
    ("time_ns", "text"), [(12.4, "12 ns"), (1500.0, "1.5 µs"), (2.5e6, "2.5 ms"), (3.21e9, "3.21 s"), (5e12, "5,000 s")]
)
def test_durations_have_three_digits(time_ns: float, text: str) -> None:
    assert duration(time_ns) == text
