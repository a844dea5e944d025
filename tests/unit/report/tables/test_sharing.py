"""What sharing saves, as reports, profiles and plans tell it."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.reports import PLAN, measured

from remat.core import plain_schedule
from remat.core.arena import Arena
from remat.core.budget import BudgetScope
from remat.layout.arena import lay_out
from remat.layout.examples import exp_of_sum
from remat.layout.sharing import share_by_tags
from remat.report import write_report
from remat.report.contents.gathered import Report, gather
from remat.report.contents.summary import summarize
from remat.report.pictures.sharing import draw_sharing
from remat.report.tables.profile import profile_facts, sharing_table
from remat.report.tables.text import plan_table


def written(table: object) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def answer(report: Report) -> str:
    (found,) = [item.text for item in summarize(report).answers if item.title == "How memory is shared"]
    return found


def arena() -> Arena:
    assert PLAN.schedule is not None
    return lay_out(PLAN.problem, PLAN.schedule, block_bytes=64)


def test_a_report_tells_both_steps_of_a_plan() -> None:
    text = answer(gather(PLAN))
    assert "Plain PyTorch. All tensors together are" in text and "With Remat. All tensors together are" in text
    assert "known of measured steps on CUDA" in text


def test_a_measured_step_says_what_was_reserved_or_that_it_is_not_known() -> None:
    assert "reserved is not known on cpu" in answer(gather(measured()))
    assert "really reserved 3.00 KiB" in answer(gather(replace(measured(), reserved_bytes=3072)))


def test_the_arena_of_a_plan_is_that_of_its_report() -> None:
    plan = replace(PLAN, arena=arena())
    assert gather(plan).footprints[1].arena_bytes == plan.arena_bytes
    # A second profile is a step of its own, for which the plan says nothing.
    assert gather(plan, measured(), measured()).footprints[1] == gather(measured()).footprints[0]


def test_facts_of_reports_and_profiles_have_the_footprint(tmp_path: Path) -> None:
    facts = json.loads(write_report(tmp_path / "report.json", measured()).read_text())
    found = facts["steps"][0]["footprint"]
    assert found == profile_facts(measured(), 3)["footprint"]
    assert found["sharing_bytes"] == found["total_bytes"] - found["arena_bytes"]
    assert found["reserved_bytes"] is None


@pytest.mark.parametrize(("reserved", "text"), [(0, "not known"), (2048, "2.00 KiB")])
def test_the_table_of_a_profile_names_every_measure(reserved: int, text: str) -> None:
    table = written(sharing_table(replace(measured(), reserved_bytes=reserved)))
    for row in ("all tensors", "alive at the peak", "arena", "arena, in place", "saved by sharing", "saved in place"):
        assert row in table
    (line,) = [line for line in table.splitlines() if "reserved by the allocator" in line]
    assert text in line


def test_a_plan_says_what_its_budget_counts() -> None:
    assert "counts live bytes" in written(plan_table(PLAN))
    counted = written(plan_table(replace(PLAN, counts=BudgetScope.ARENA, arena=arena())))
    assert "counts the arena" in counted
    assert "  arena  " in counted


def test_a_picture_shows_every_buffer_and_every_handover() -> None:
    problem = exp_of_sum()
    sharing = share_by_tags(problem, plain_schedule(problem.graph))
    names = {buffer.id: f"<{number}>" for number, buffer in enumerate(sharing.storages.buffers)}
    picture = draw_sharing("title", [("caption", sharing)], names)
    assert all(f"&lt;{number}&gt;" in picture for number in range(3))
    assert picture.count('stroke-width="3"') == 2
    assert "caption: 64 B" in picture
