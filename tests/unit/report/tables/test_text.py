"""Tables: they say what was asked, what was found and what is proven."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from remat.core.graph import Graph, Op, OpId, ValueId
from remat.core.problem import Costs, Problem
from remat.core.results.plan import Fingerprint, Plan
from remat.core.schedule import Schedule
from remat.core.solution import Solution, Status
from remat.report.tables.text import plan_table, solution_table, training_table
from remat.report.tables.training import TrainingComparison

GRAPH = Graph(
    ops=(Op("a", (), (ValueId(0),)), Op("b", (ValueId(0),), (ValueId(1),), backward=True)),
    value_count=2,
    outputs=(ValueId(1),),
    name="two ops",
)
PROBLEM = Problem(GRAPH, Costs((2e6, 3e6), (0, 0), (1024, 2048)), budget_bytes=4096)
SOLUTION = Solution(Status.OPTIMAL, Schedule((OpId(0), OpId(1))), 5e6, 3072, 5e6, 3072, "auto")
PLAN = Plan(PROBLEM, SOLUTION, Fingerprint((), "2.13.0", "cpu", ()), 8192, breakdown_bytes=(("parameters", 512),))
RUN = TrainingComparison(
    model="gpt",
    device="cpu",
    plain_losses=(1.5, 1.25),
    planned_losses=(1.5, 1.25),
    budget_bytes=500,
    plain_peak_bytes=1000,
    predicted_peak_bytes=490,
    measured_peak_bytes=500,
    plain_seconds=1.0,
    planned_seconds=1.2,
    planning_seconds=3.0,
    solver="auto",
    status="FEASIBLE",
    gap=0.01,
)


def rendered(table: Table) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_plan_table_shows_budget_peaks_and_proof() -> None:
    text = rendered(plan_table(PLAN))
    for fact in ("OPTIMAL", "4.00 KiB (0.50x)", "8.00 KiB", "3.00 KiB", "at most 0.00%", "parameters", "5.000 ms"):
        assert fact in text


def test_solution_table_shows_time_in_the_file_s_unit() -> None:
    text = rendered(solution_table(PROBLEM, SOLUTION, seconds=0.5))
    assert "5,000,000 (+0.00% over 5,000,000)" in text
    assert "2 for 2 ops" in text


def test_training_table_says_equal_and_within_budget() -> None:
    text = rendered(training_table(RUN))
    for fact in ("1.250000", "equal", "0.50x, within budget", "-2.00%", "1.20x", "1.00%"):
        assert fact in text


def test_training_table_shows_a_loss_that_differs_and_a_peak_over_budget() -> None:
    text = rendered(training_table(replace(RUN, planned_losses=(1.5, 1.3), measured_peak_bytes=501)))
    assert "differ" in text
    assert "over budget" in text


def test_small_gap_is_not_shown_as_none() -> None:
    assert "below 0.01%" in rendered(training_table(replace(RUN, gap=2e-6)))


def test_training_json_carries_the_derived_facts() -> None:
    facts = RUN.to_json()
    assert facts["same_losses"] is True
    assert facts["within_budget"] is True
    assert facts["time_ratio"] == 1.2
