"""Pareto curves and largest batches as text: every fact is there, nothing is wider than a terminal."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from remat.core.results.max_batch import Limit, MaxBatch
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.report.pictures.curve import draw_curve
from remat.report.tables.chart import chart_text, pareto_chart
from remat.report.tables.max_batch import max_batch_sentence, max_batch_table
from remat.report.tables.pareto import best_within, pareto_tables, shown_baselines

MIB = 1 << 20
CURVE = Pareto(
    name="gpt",
    device="cpu",
    plain_peak_bytes=100 * MIB,
    base_time_ns=2e6,
    floor_bytes=20 * MIB,
    points=(
        ParetoPoint("auto", 100 * MIB, 99 * MIB, 2e6, 2e6),
        ParetoPoint("auto", 60 * MIB, 59 * MIB, 2.2e6, 2.1e6),
        ParetoPoint("auto", 30 * MIB, 30 * MIB, 3e6, 2.5e6),
    ),
    baselines=(
        ParetoPoint("full", 40 * MIB, 40 * MIB, 2.9e6, 2.1e6),
        ParetoPoint("mu_two", 100 * MIB, 90 * MIB, 2.1e6, 2e6),
        ParetoPoint("mu_two", 60 * MIB, 90 * MIB, 2.1e6, 2e6),
        ParetoPoint("mu_two", 50 * MIB, 95 * MIB, 2.4e6, 2e6),
    ),
)
RUN = replace(
    CURVE, points=tuple(replace(p, measured_peak_bytes=p.peak_bytes, measured_ratio=1.1) for p in CURVE.points)
)
FOUND = MaxBatch(
    name="gpt",
    device="cpu",
    axis="batch",
    grid=2,
    budget_bytes=50 * MIB,
    plain=Limit(16, 49 * MIB, 0.0),
    checkpointed=Limit(40, 48 * MIB, 0.3),
    ours=Limit(64, 50 * MIB, 0.5),
    predicted=66,
    measured_peak_bytes=50 * MIB,
    real_steps=1,
    time_error=0.1,
)


def printed(*renderables: RenderableType) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(*renderables)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_tables_tell_budget_time_bound_and_gap() -> None:
    text = printed(*pareto_tables(CURVE))
    for fact in ("plain peak 100.00 MiB", "20.00 MiB", "0.600x", "10.00%", "5.00%", "4.55%", "full"):
        assert fact in text
    assert "measured" not in text


def test_tables_of_points_that_ran_show_what_was_measured() -> None:
    assert "1.10x" in printed(*pareto_tables(RUN))


def test_strategies_are_listed_without_points_that_their_own_better() -> None:
    assert [(p.solver, p.peak_bytes // MIB) for p in shown_baselines(CURVE)] == [("full", 40), ("mu_two", 90)]


def test_best_known_at_a_peak_may_be_another_strategy() -> None:
    best = best_within(CURVE, 45 * MIB)
    assert best is not None
    assert best.solver == "full"
    assert best_within(CURVE, 10 * MIB) is None


def test_chart_shows_lead_bound_and_letters() -> None:
    text = chart_text(pareto_chart(CURVE))
    assert text.count("o") > 3
    assert "a full, b mu_two" in text
    assert "100.00 MiB" in text and "30.00 MiB" in text
    assert max(map(len, text.splitlines())) <= 120


def test_chart_of_no_points_is_empty() -> None:
    assert chart_text(pareto_chart(replace(CURVE, points=()))) == ""


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_curve_is_drawn(tmp_path: Path, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = draw_curve(tmp_path / f"curve.{suffix}", pareto_chart(RUN))
    assert path.read_bytes().startswith(magic)


def test_three_ways_stand_side_by_side() -> None:
    text = printed(max_batch_table(FOUND))
    for fact in (
        "plain",
        "per-block checkpointing",
        "Remat",
        "16",
        "40",
        "64",
        "4.00x",
        "50.0%",
        "predicted 66",
    ):
        assert fact in text


def test_model_without_blocks_says_so() -> None:
    assert "no repeated blocks" in printed(max_batch_table(replace(FOUND, checkpointed=None)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "A batch of 64 fits with Remat, 4.00 times the 16 that fits plainly."),
        ({"ours": Limit(40, MIB, 0.1)}, "Remat gains nothing here: 40, where 40 fits without it."),
        ({"plain": Limit(0, 0, 0.0)}, "A batch of 64 fits with Remat; plainly not even 2 does."),
        ({"note": "the graphs differ"}, "because the graphs differ."),
    ],
)
def test_sentence_says_what_is_gained(changes: dict[str, object], sentence: str) -> None:
    assert sentence in max_batch_sentence(replace(FOUND, **changes))  # type: ignore[arg-type]


def test_gain_over_nothing_is_infinite() -> None:
    assert replace(FOUND, plain=Limit(0, 0, 0.0)).gain == float("inf")
