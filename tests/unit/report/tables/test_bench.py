"""The experiments as tables and pictures: every fact is there, predicted beside measured, and the files appear."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.benches import BENCH, EXPERIMENT, LARGE, SMALL

from remat.core.results.bench import Bench, Way
from remat.report.tables.bench import bench_markdown, bench_sheets, doubts, verdicts
from remat.report.tables.sheet import Sheet


def text_of(sheet: Sheet) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(sheet.as_table())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_first_table_has_every_way_at_every_batch() -> None:
    sheet = next(bench_sheets(BENCH))
    assert [(row[1], row[0].split(" ≤")[0]) for row in sheet.rows] == [
        (batch, way) for batch in ("4", "8") for way in Way
    ]
    assert all(len(row) == len(sheet.columns) for row in sheet.rows)


def test_second_table_sets_savings_beside_published_ones() -> None:
    sheet = list(bench_sheets(BENCH))[1]
    assert sheet.rows[0][:3] == ("published, ResNet", "20% to 30%", "45% to 60%")
    rows = {row[0]: row for row in sheet.rows[1:]}
    assert rows["optimal ≤ 20%"] == (
        "optimal ≤ 20%",
        "+20.0% / +19.0%",
        "60.0% / 60.0%",
        "66.0% / 66.0%",
        "within",
    )
    assert rows["optimal ≤ 30%"][-1] == "above"
    assert rows["sqrt_n"][-1] == "below"


def test_third_table_says_what_the_peak_is_made_of() -> None:
    sheet = list(bench_sheets(BENCH))[2]
    assert sheet.columns == ("way", "peak", "activations", "parameters", "gradients", "workspace")
    assert sheet.rows[0] == ("plain", "110.00 MiB", "90.00 MiB", "10.00 MiB", "10.00 MiB", "–")


def test_tables_fit_a_terminal_without_losing_a_letter() -> None:
    for sheet in bench_sheets(BENCH):
        assert "…" not in text_of(sheet)


def test_verdict_says_what_is_predicted_and_what_is_measured() -> None:
    late = replace(LARGE.trials[-1], measured=replace(LARGE.trials[-1].measured, overhead=0.5))
    case = replace(LARGE, trials=(*LARGE.trials[:-1], late))
    bench = replace(BENCH, experiments=(replace(EXPERIMENT, cases=(SMALL, case)),))
    assert "as predicted, the optimal plans beat" in verdicts(bench)[0]
    assert "they do not beat them" in verdicts(bench)[0]


def test_ops_that_take_longer_than_their_step_raise_a_doubt() -> None:
    case = replace(LARGE, plain_seconds=0.5)
    bench = replace(BENCH, experiments=(replace(EXPERIMENT, cases=(SMALL, case)),))
    assert doubts(BENCH) == []
    assert doubts(bench) == [
        "resnet50, batch 8: its ops were measured at 0.5 s together, its plain step at 0.1 s; the machine was busy, "
        "and predicted overheads cannot be trusted: run again."
    ]


def test_markdown_holds_all_tables_verdicts_and_omissions() -> None:
    text = bench_markdown(BENCH)
    assert text.count("\n## ") == 3
    assert "| published, ResNet | 20% to 30% | 45% to 60% |" in text
    assert "- gpt at batch 4096 was left out." in text
    assert "share of all the memory" in text


def test_model_without_published_figures_has_no_verdict() -> None:
    bench = replace(BENCH, experiments=(replace(EXPERIMENT, model="mlp"),))
    assert verdicts(bench) == []
    assert all("published," not in row[0] for sheet in bench_sheets(bench) for row in sheet.rows)


PICTURES = ("peak", "time", "saved", "breakdown")
INTERRUPTED = replace(BENCH, experiments=(replace(EXPERIMENT, cases=(SMALL,), curve=None, breakdowns=()),))


@pytest.mark.parametrize(("bench", "pictures"), [(BENCH, PICTURES), (INTERRUPTED, PICTURES[:3])])
def test_pictures_of_each_model_are_written_in_both_formats(
    tmp_path: Path, bench: Bench, pictures: tuple[str, ...]
) -> None:
    pytest.importorskip("matplotlib")
    from remat.report.pictures.bench import draw_bench

    files = draw_bench(bench, tmp_path)
    names = {f"{name}-resnet50{suffix}" for name in pictures for suffix in (".png", ".svg")}
    assert {path.name for path in files} == names == {path.name for path in tmp_path.iterdir()}
    assert "published" in (tmp_path / "saved-resnet50.svg").read_text()
