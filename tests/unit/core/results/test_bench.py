"""Savings as shares of two things, and what it takes to beat published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.benches import BENCH, EXPERIMENT, LARGE, MIB

from remat.core.document import read_document
from remat.core.results.bench import LIMITS, BenchTrial, Case, Experiment, Figures, Way, encode_bench, save_bench


def with_optimal(limit: float, measured: Figures, predicted: Figures | None = None) -> Experiment:
    def changed(trial: BenchTrial) -> BenchTrial:
        if (trial.way, trial.limit) != (Way.OPTIMAL, limit):
            return trial
        return replace(trial, measured=measured, predicted=predicted or trial.predicted)

    return replace(EXPERIMENT, cases=(replace(LARGE, trials=tuple(map(changed, LARGE.trials))),))


def test_savings_are_shares_of_the_peak_and_of_activations() -> None:
    saved = LARGE.saved(next(trial for trial in LARGE.trials if trial.way is Way.PER_BLOCK))
    assert saved.peak_predicted == saved.peak_measured == pytest.approx(50 / 110)
    assert saved.activations_predicted == saved.activations_measured == pytest.approx(50 / 100)


def test_plain_saves_nothing() -> None:
    assert LARGE.saved(LARGE.plain).peak_measured == LARGE.saved(LARGE.plain).activations_measured == 0


def test_step_time_follows_the_ratio_not_the_clock() -> None:
    slow = replace(LARGE.trials[1], seconds=99.0)
    assert LARGE.step_seconds(slow) == pytest.approx(0.1 * 1.32)
    assert LARGE.step_seconds(LARGE.plain) == LARGE.plain.seconds


def test_each_way_stands_once_at_a_limit() -> None:
    ways = [trial.way for trial in LARGE.at(LIMITS[0])]
    assert ways == list(Way)


def test_more_than_published_at_both_ends_beats_it() -> None:
    assert EXPERIMENT.beats_published(measured=False) is True
    assert EXPERIMENT.beats_published(measured=True) is True


@pytest.mark.parametrize(
    ("limit", "measured"),
    [
        (0.20, Figures(61 * MIB, 0.1)),
        (0.30, Figures(45 * MIB, 0.1)),
        (0.30, Figures(33 * MIB, 0.31)),
    ],
    ids=["saves too little at the first", "saves too little at the last", "takes too long"],
)
def test_what_was_measured_must_keep_both_promises(limit: float, measured: Figures) -> None:
    assert with_optimal(limit, measured).beats_published(measured=True) is False
    assert with_optimal(limit, measured).beats_published(measured=False) is True


def test_predicted_savings_below_published_do_not_beat_them() -> None:
    poor = Figures(50 * MIB, 0.3)
    assert with_optimal(0.30, poor, poor).beats_published(measured=False) is False


def test_nothing_is_claimed_where_nothing_is_published_or_run() -> None:
    assert replace(EXPERIMENT, model="mlp").beats_published(measured=True) is None
    only_plain: Case = replace(LARGE, trials=LARGE.trials[:1])
    assert replace(EXPERIMENT, cases=(only_plain,)).beats_published(measured=True) is None


def test_file_is_versioned_and_holds_facts_and_shares(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    save_bench(BENCH, path)
    record = read_document(path, {"remat-bench": 1})
    assert json.loads(path.read_text()) == json.loads(json.dumps(encode_bench(BENCH)))
    assert [item.text("model") for item in record.records("experiments")] == ["resnet50"]
    summary = record.records("summary")[0]
    assert summary.flag("beats_published_measured")
    assert len(summary.records("saved")) == len(LARGE.trials)
