"""What a report is made from, what it says in words, and how a step is thinned."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.reports import PLAN, curve, large_plan, measured

from remat.core import Solution, Status
from remat.core.results.plan import CompiledStep
from remat.core.results.profile import Phase
from remat.errors import UnknownName
from remat.report.contents.decisions import decisions
from remat.report.contents.gathered import gather
from remat.report.contents.lifetimes import idle_share, lifetimes
from remat.report.contents.samples import phases, sample
from remat.report.contents.summary import format_ns, summarize

BOTH = gather(PLAN, name="small")


def infeasible() -> Solution:
    return Solution(Status.INFEASIBLE, None, 0.0, 0, 0.0, 900, "auto", "Nothing fits.")


def test_plan_brings_both_steps() -> None:
    assert [title for title, _ in BOTH.steps] == ["Plain PyTorch", "With Remat"]
    assert BOTH.budget_bytes == PLAN.budget_bytes


def test_of_two_profiles_the_first_is_before() -> None:
    first, second = measured("one"), measured("two")
    report = gather(first, curve(), second)
    assert (report.before, report.after, report.name) == (first, second, "one")


@pytest.mark.parametrize("sources", [(), (PLAN, PLAN), (measured(),) * 3, (curve(), curve())])
def test_too_many_sources_or_none_are_refused(sources: tuple[object, ...]) -> None:
    with pytest.raises(UnknownName):
        gather(*sources)  # type: ignore[arg-type]


def test_words_state_peak_cost_and_certainty() -> None:
    summary = summarize(BOTH)
    text = " ".join(answer.text for answer in summary.answers)
    assert summary.headline.startswith("small trains in ")
    assert "less memory" in summary.headline and "more time" in summary.headline
    assert "activations" in text and "recomputations" in text and "budget" in text
    assert [answer.title for answer in summary.answers] == [
        "What fills the memory",
        "What Remat does about it",
        "What it costs",
        "How memory is shared",
        "How sure this is",
    ]


def test_optimal_and_feasible_plans_say_what_is_proven() -> None:
    optimal = replace(PLAN, solution=replace(PLAN.solution, status=Status.OPTIMAL))
    feasible = replace(PLAN, solution=replace(PLAN.solution, status=Status.FEASIBLE, bound_ns=0.9 * PLAN.bound))
    assert "none is faster" in summarize(gather(optimal)).answers[-1].text
    assert "from the fastest" in summarize(gather(feasible)).answers[-1].text


def test_compiled_steps_say_what_was_predicted_and_what_they_took() -> None:
    compiled = CompiledStep(PLAN.predicted_peak, 80e6)
    seen = replace(compiled, seen_ns=100e6)
    before, after = (summarize(gather(replace(PLAN, compiled=item))).answers[-1].text for item in (compiled, seen))
    assert "one by one" not in before
    assert "take 80.0 ms; its first steps took 100 ms on the device (+25.0%)" in after


def test_plan_without_a_schedule_says_what_would_fit() -> None:
    report = gather(replace(PLAN, solution=infeasible()), name="small")
    summary = summarize(report)
    assert "does not fit" in summary.headline
    assert "900 B" in summary.answers[-1].text
    assert report.after is None and decisions(report) is not None


def test_profile_alone_names_its_largest_class() -> None:
    summary = summarize(gather(measured()))
    assert "activations" in summary.headline
    assert "measured" in summary.answers[-1].text


@pytest.mark.parametrize(("time", "text"), [(0, "0 ns"), (1.5e6, "1.50 ms"), (532e6, "532 ms"), (2.5e12, "2,500 s")])
def test_times_have_three_digits_that_count(time: float, text: str) -> None:
    assert format_ns(time) == text


def test_thinning_keeps_the_peak_and_exact_sums() -> None:
    step = gather(large_plan(8)).steps[1][1]
    found = sample(step, points=40)
    totals = [sum(parts) for parts in zip(*found.by_class.values(), strict=True)]
    assert len(found.rows) == 40
    assert totals[found.peak] == step.peak_bytes == max(totals)
    assert totals == [step.during_bytes[row.position] for row in found.rows]


def test_samples_name_the_largest_live_storages() -> None:
    step = BOTH.steps[0][1]
    for row in sample(step).rows:
        largest = [step.storages[number].size_bytes for number in row.largest]
        assert largest == [item.size_bytes for item in step.live_at(row.position)[: len(largest)]]
        assert len(largest) == 5 or len(largest) == len(
            [item for item in step.live_at(row.position) if item.size_bytes]
        )


def test_phases_cover_the_step_also_when_thinned() -> None:
    step = gather(large_plan(4)).steps[1][1]
    for points in (1200, 5):
        runs = phases(step, points)
        assert len(runs) <= max(points, 5)
        assert runs[0].start_ns == 0 and runs[-1].end_ns == pytest.approx(sum(op.time_ns for op in step.ops))
        assert all(left.end_ns == right.start_ns for left, right in zip(runs, runs[1:], strict=False))
    assert Phase.RECOMPUTE in {run.phase for run in phases(step)}


def test_step_without_ops_or_times_is_sampled_too() -> None:
    nothing = replace(measured(), ops=(), storages=())
    assert sample(nothing).rows == () and sample(nothing).peak == -1
    untimed = replace(measured(), ops=tuple(replace(op, time_ns=0.0) for op in measured().ops))
    assert sample(untimed).starts_ns[-1] == len(untimed.ops)


def test_followed_ops_fill_the_step_s_own_time() -> None:
    step = replace(measured(), seconds=2 * measured().seconds)
    assert sample(step).starts_ns[-1] == pytest.approx(step.seconds * 1e9)


def test_lifetimes_pair_a_value_before_and_after() -> None:
    (panel,) = lifetimes(BOTH)
    again = [row for row in panel.rows if any(life.recomputed for life in row.after)]
    assert panel.paired and again
    assert all(len(row.before) == 1 for row in panel.rows)
    for row in again:
        assert all(left.end_ns <= right.start_ns for left, right in zip(row.after, row.after[1:], strict=False))
    assert [row.before[0].start_ns for row in panel.rows] == sorted(row.before[0].start_ns for row in panel.rows)


def test_measured_steps_have_a_panel_each() -> None:
    panels = lifetimes(gather(measured(), measured()))
    assert [(panel.paired, panel.title) for panel in panels] == [(False, "Before"), (False, "After")]
    assert all(not row.after for panel in panels for row in panel.rows)


def test_idle_share_is_between_nothing_and_everything() -> None:
    assert 0 < idle_share(measured()) < 1
    assert idle_share(replace(measured(), storages=())) == 0


def test_decisions_add_up_to_the_plan() -> None:
    table = decisions(BOTH)
    assert table is not None
    assert sum(float(row.cells[6]) for row in table.modules) == pytest.approx(PLAN.overhead)
    assert all(len(row.cells) == len(table.columns) for row in (*table.blocks, *table.modules))
