"""The classic experiments at sizes of no consequence: every way really runs, within its budget, and files appear."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch

from remat import zoo
from remat.bench.batch import Autocast
from remat.bench.experiment import Audience, costs_measured_anew, run_bench
from remat.bench.suite import Effort, Subjects, Suite
from remat.cli import app
from remat.cli.bench import write_bench
from remat.core.results.bench import LIMITS, Bench, Way

SIZES = dict(length=32, vocabulary=32, width=32, depth=3, heads=2)
EFFORT = Effort(points=3, rounds=1, time_limit_s=0.2, pairs=1)


def suite_of(*batches: int, precision: str = "fp32") -> Suite:
    return Suite((Subjects("gpt", dict(SIZES), batches, precision),), EFFORT)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return run_bench(suite_of(4, 8), "cpu", 0, Audience())


def test_every_way_is_run_at_every_batch(bench: Bench) -> None:
    (experiment,) = bench.experiments
    assert [case.batch for case in experiment.cases] == [4, 8]
    for case in experiment.cases:
        assert [trial.way for trial in case.at(LIMITS[0])] == list(Way)
    optimal = [trial.limit for trial in experiment.largest.trials if trial.way is Way.OPTIMAL]
    assert optimal == list(LIMITS)


def test_measured_peaks_keep_within_budget_and_are_as_predicted(bench: Bench) -> None:
    for case in bench.experiments[0].cases:
        for trial in case.trials:
            if trial.budget_bytes is not None:
                assert trial.measured.peak_bytes <= trial.budget_bytes
            assert trial.measured.peak_bytes == pytest.approx(trial.predicted.peak_bytes, rel=0.02)
            assert trial.seconds > 0


def test_predicted_overheads_keep_within_their_limits(bench: Bench) -> None:
    for case in bench.experiments[0].cases:
        for trial in case.trials:
            assert trial.limit is None or trial.predicted.overhead <= trial.limit + 1e-9
            assert trial.way is Way.PLAIN or trial.predicted.peak_bytes < case.plain.predicted.peak_bytes


def test_optimal_is_never_worse_than_mu_two_at_the_same_limit(bench: Bench) -> None:
    trials = {(trial.way, trial.limit): trial.predicted.peak_bytes for trial in bench.experiments[0].largest.trials}
    for limit in LIMITS:
        assert trials[Way.OPTIMAL, limit] <= trials[Way.MU_TWO, limit]


def test_curve_and_breakdowns_are_those_of_the_largest_batch(bench: Bench) -> None:
    experiment = bench.experiments[0]
    assert experiment.curve is not None
    assert experiment.curve.plain_peak_bytes == experiment.largest.plain.predicted.peak_bytes
    peaks = {(trial.way, trial.limit): trial.predicted.peak_bytes for trial in experiment.largest.trials}
    for item in experiment.breakdowns:
        assert sum(item.bytes_by_class.values()) == pytest.approx(peaks[item.way, item.limit], rel=1e-3)


def test_files_appear_in_one_folder(bench: Bench, tmp_path: Path) -> None:
    files = write_bench(bench, tmp_path)
    assert {path.name for path in files} == {path.name for path in tmp_path.iterdir()}
    assert len(files) == 2 + 4 * 2
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert (facts["format"], facts["version"]) == ("remat-bench", 1)
    assert "published, transformer" in (tmp_path / "bench.md").read_text()


def test_a_stop_keeps_what_is_done(bench: Bench) -> None:
    kept: list[Bench] = []
    audience = Audience(keep=kept.append, stop=lambda: bool(kept))
    found = run_bench(suite_of(2, 4), "cpu", 0, audience)
    assert found.experiments == kept[-1].experiments
    assert found.skipped == ("Stopped after 1 of 2 batches.",)
    assert [case.batch for case in found.experiments[0].cases] == [4]


def test_a_stop_at_once_leaves_nothing() -> None:
    assert run_bench(suite_of(2), "cpu", 0, Audience(stop=lambda: True)).experiments == ()


def test_a_batch_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("nothing left")

    monkeypatch.setattr("remat.bench.batch.prepare", run_out)
    found = run_bench(suite_of(4), "cpu", 0, Audience())
    assert found.experiments == ()
    assert found.skipped == ("gpt at batch 4 was left out: the device has too little memory for it.",)


def test_autocast_computes_in_its_precision_whoever_calls() -> None:
    example = zoo.build("gpt", **SIZES, batch=2)
    model = Autocast(example.model, torch.bfloat16, "cpu")
    assert model(example.args[0]).dtype is torch.bfloat16


def test_costs_are_measured_anew_and_the_cache_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", "here")
    with costs_measured_anew():
        assert os.environ["REMAT_CACHE_DIR"] != "here"
    assert os.environ["REMAT_CACHE_DIR"] == "here"


def test_command_prints_one_json_object_and_writes_the_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(suite: Suite, device: str, seed: int, audience: Audience) -> Bench:
        assert [subjects.batches for subjects in suite.subjects] == [(4, 8)]
        audience.tell(0, 2, "gpt, batch 8: running plain")
        audience.keep(bench)
        assert (tmp_path / "out" / "bench.json").is_file()
        return bench

    monkeypatch.setattr("remat.bench.experiment.run_bench", run)
    arguments = ["--device", "cpu", "--models", "gpt", "--batches", "8,4", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["bench", *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert [case["batch"] for case in facts["experiments"][0]["cases"]] == [4, 8]
    assert all(Path(path).is_file() for path in facts["files"])
    assert "1 of 2: gpt, batch 8: running plain" in result.stderr
    assert "published, transformer" in CliRunner().invoke(app, ["bench", *arguments]).stdout


@pytest.mark.gpu
def test_cuda_in_half_precision_keeps_within_budget() -> None:
    found = run_bench(suite_of(8, precision="bf16"), "cuda", 0, Audience())
    for trial in found.experiments[0].largest.trials:
        assert trial.budget_bytes is None or trial.measured.peak_bytes <= trial.budget_bytes
