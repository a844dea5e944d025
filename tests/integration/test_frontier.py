"""The frontier benchmark on a CPU: real rows of a tiny model, files that read back, and verdicts on made-up rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

import torch
from benchmarks.frontier.__main__ import main
from benchmarks.frontier.batches import largest_fit, next_batch
from benchmarks.frontier.campaign import Campaign, Settings
from benchmarks.frontier.families import DEVELOPMENT, REPORTED, Denoiser
from benchmarks.frontier.largest_batch import Candidate, Conditions, Found, bars, search, timed
from benchmarks.frontier.models import MODELS, build
from benchmarks.frontier.picture import best_line
from benchmarks.frontier.rows import Results, Row, Status, load_results, save_results
from benchmarks.frontier.table import markdown
from benchmarks.frontier.trial import Request, Trial
from benchmarks.frontier.verdict import (
    GIB,
    best_peer,
    budgets_by_peers,
    doubts,
    smallest_ours,
    verdict_on,
    verdicts,
)
from benchmarks.frontier.ways import Blocks, Treatment, Way, ours, peers, selected
from benchmarks.frontier.worker import _status_of
from benchmarks.frontier.workers import Answer, Surroundings, Worker

import remat
from remat.errors import FileFormatError


def row(name: str, ms: float | None, gib: float, *, budget: float | None = None, **changes: object) -> Row:
    made = Row(
        name,
        name,
        is_ours=budget is not None,
        status=Status.RAN if ms is not None else Status.OUT_OF_MEMORY,
        rounds_ms=() if ms is None else ((ms, ms), (ms,)),
        peak_bytes=None if ms is None else int(gib * GIB),
        budget_bytes=None if budget is None else int(budget * GIB),
        loss=10.0,
        gradient_norm=1.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


PEERS = (
    row("eager", 225.0, 43.6),
    row("compile", 109.0, 21.16),
    row("selective", 114.0, 14.604),
    row("slow", 130.0, 17.0),
    row("block", 138.0, 7.83),
    row("too large", None, 0.0),
)


def test_best_peer_is_the_fastest_that_ran_and_fits() -> None:
    names = {budget: best_peer(PEERS, budget * GIB) for budget in (50.0, 21.2, 14.6, 12.0, 7.83, 7.0)}
    assert [peer and peer.name for peer in names.values()] == [
        "compile",
        "compile",
        "selective",
        "block",
        "block",
        None,
    ]


def test_budgets_by_peers_are_their_peaks_a_middle_and_less_than_the_leanest() -> None:
    found = [int(text.removesuffix("MiB")) / 1024 for text in budgets_by_peers(PEERS)]
    assert found == pytest.approx([21.16, 14.604, (14.604 + 7.83) / 2, 7.83, 0.85 * 7.83], abs=2e-3)
    assert all(best_peer(PEERS, size * GIB) is not None for size in found[:-1])
    assert budgets_by_peers(()) == []


def test_each_peer_that_was_not_timed_by_itself_has_a_budget() -> None:
    found = [int(text.removesuffix("MiB")) / 1024 for text in budgets_by_peers(PEERS, timed=False)]
    assert found[:5] == pytest.approx([43.6, 21.16, 17.0, 14.604, (14.604 + 7.83) / 2], abs=2e-3)


def test_halves_to_fit_on_and_to_report_on_have_no_model_in_common() -> None:
    assert not DEVELOPMENT.keys() & REPORTED.keys()
    assert len(MODELS) == len({*MODELS} | {*DEVELOPMENT} | {*REPORTED}), "a name is used once"
    assert len(DEVELOPMENT) + len(REPORTED) >= 12


def test_denoiser_joins_what_it_held_at_every_size() -> None:
    model = Denoiser(widths=(32, 64), blocks=2, heads=2, attended=1)
    image, noise = torch.randn(2, 2, 4, 8, 8)
    loss = model(image, noise)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_our_rows_and_rows_that_did_not_run_are_no_peers() -> None:
    assert best_peer((row("ours", 1.0, 1.0, budget=2.0), row("crashed", None, 0.0)), 50 * GIB) is None


def test_ours_is_held_to_its_budget_and_its_bar() -> None:
    rows = (
        *PEERS,
        row("ahead", 111.0, 14.5, budget=14.6),
        row("behind", 113.0, 14.5, budget=14.6),
        row("over", 100.0, 14.61, budget=14.6),
        row("none", None, 0.0, budget=12.0),
        row("alone", 150.0, 6.4, budget=6.5),
    )
    found = {item.row.name: item for item in verdicts("gpt2-medium", rows)}
    assert found["ahead"].ratio == pytest.approx(111 / 114)
    assert {name: item.met for name, item in found.items()} == {
        "ahead": True,
        "behind": False,
        "over": False,
        "none": False,
        "alone": None,
    }
    assert found["alone"].peer is None and found["alone"].ratio is None
    assert not found["over"].holds_budget
    smallest = smallest_ours(rows)
    assert smallest is not None and smallest.name == "alone"


def test_peers_are_set_against_each_other_at_their_own_peaks() -> None:
    slow = next(item for item in PEERS if item.name == "slow")
    assert verdict_on(slow, PEERS).ratio == pytest.approx(130 / 114)


def test_table_names_what_did_not_run_and_doubts_what_computed_something_else() -> None:
    odd = row("ours", 100.0, 10.0, budget=12.0, loss=13.0, gradient_norm=None)
    results = Results("gpt2-medium", 16, "a device", "2.11", "cold", (*PEERS, odd))
    text = markdown(results)
    assert "| too large |  |  |" in text and "out of memory" in text
    assert "| ours | 12.00 | 100.0 | 10.00 | block | 138.0 | 0.725 | 0.85 | yes |" in text
    assert len(list(doubts(results.rows))) == 2


def test_results_read_back(tmp_path: Path) -> None:
    results = Results("gpt2-medium", 16, "a device", "2.11", "cold", PEERS)
    save_results(results, tmp_path / "rows.json")
    assert load_results(tmp_path / "rows.json") == results
    (tmp_path / "rows.json").write_text('{"format": "remat-frontier", "version": 99}')
    with pytest.raises(FileFormatError):
        load_results(tmp_path / "rows.json")


def test_best_line_leaves_out_what_is_larger_and_slower() -> None:
    assert best_line([(3.0, 1.0), (1.0, 5.0), (2.0, 6.0)]) == [(1.0, 5.0), (3.0, 1.0)]


def test_ways_are_picked_by_pattern_and_treated_by_name() -> None:
    every = peers([Treatment.PLAIN, Treatment.ONE_GRAPH]) + ours(["14.6", "0.5x"])
    assert len({way.name for way in every}) == len(every) == 2 + 2 * 9 + 2
    assert [way.name for way in selected(every, ["compile", "ours-*"], ["*0.5x"])] == ["compile", "ours-14.6"]
    assert [way.budget for way in every if way.is_ours] == ["14.6 GiB", "0.5x"]


@pytest.mark.parametrize("blocks", list(Blocks)[1:])
def test_checkpointed_blocks_compute_the_same(blocks: Blocks) -> None:
    def gradients(way: Way) -> tuple[torch.Tensor, ...]:
        trial = Trial(Request("mlp-tiny", way, "cpu", batch=16))
        torch.manual_seed(3)
        trial.step()
        return tuple(item.grad for item in trial.workload.model.parameters() if item.grad is not None)

    plain, again = gradients(Way("eager", "eager")), gradients(Way("again", "again", blocks=blocks))
    assert plain and all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("-tiny")])
def test_tiny_models_return_a_loss_alone(name: str) -> None:
    if name != "mlp-tiny":
        pytest.importorskip("transformers")
    workload = build(name, "cpu", batch=2)
    loss = workload.model(workload.inputs, workload.labels)
    assert loss.ndim == 0 and torch.isfinite(loss)


def test_statuses_are_told_from_what_was_raised() -> None:
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert _status_of(wrapped) is Status.OUT_OF_MEMORY
    assert _status_of(remat.InfeasibleBudget("too small", 1)) is Status.INFEASIBLE
    assert _status_of(ValueError("no")) is Status.FAILED


@pytest.mark.slow
def test_a_run_on_a_cpu_measures_every_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--models", "mlp-tiny", "--budgets", "0.8x", "--steps", "2"]
    only = ["--only", "eager", "ours-eager-*", "--eager-kernels", "--compile-threads", "1"]
    places = ["--output", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main([*arguments, *only, *places]) == 0
    results = load_results(tmp_path / "frontier_mlp-tiny.json")
    assert [item.name for item in results.rows] == ["eager", "ours-eager-0.8x"]
    assert {item.name: item.reason for item in results.rows if not item.ran} == {}
    eager, planned = results.rows
    assert eager.peak_bytes and planned.peak_bytes and planned.budget_bytes
    assert planned.peak_bytes <= planned.budget_bytes < eager.peak_bytes
    assert planned.predicted_bytes == pytest.approx(planned.peak_bytes, rel=0.02)
    assert [len(times) for times in eager.rounds_ms] == [2, 2]
    assert planned.graphs == 1
    assert list(doubts(results.rows)) == []
    assert capsys.readouterr().out.strip() == (tmp_path / "frontier_mlp-tiny.md").read_text().strip()
    assert all((tmp_path / f"frontier_mlp-tiny.{suffix}").stat().st_size for suffix in ("png", "svg"))


class Scripted:
    """A worker that answers as it is told."""

    def __init__(self, answers: dict[str, list[Answer]], request: dict[str, dict[str, str]]) -> None:
        self.answers = answers[request["way"]["name"]]

    def ready(self, limit_s: float) -> Answer:
        return self.answers.pop(0)

    def time(self, steps: int, limit_s: float) -> Answer:
        return Answer({"step_ms": [1.0] * steps, "peak_bytes": 7, "reserved_bytes": 9, "predicted_ms": None})

    def end(self) -> None:
        pass


READY = Answer({"seconds": 1.0, "graphs": 1, "loss": 1.0, "gradient_norm": 1.0, "first_peak_bytes": 8} | {
    "predicted_bytes": None, "predicted_ms": None, "budget_bytes": None})  # fmt: skip


def campaign(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[Answer]], deadline: float = 1e12
) -> Callable[..., Results]:
    monkeypatch.setattr("benchmarks.frontier.campaign.Worker", lambda request, name, around: Scripted(answers, request))
    settings = Settings("cpu", 1, 2, 1, 8, 2, 2, deadline, 9.0, Surroundings(Path("unused"), Path("unused")))
    kept: list[Results] = []
    return Campaign(Results("mlp-tiny", 1, "", "", "cold"), settings, kept.append, lambda what: None).run


def test_what_runs_out_of_memory_beside_others_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Answer(None, Status.OUT_OF_MEMORY, "no memory")
    answers = {"a": [full, READY], "b": [full, full], "c": [Answer(None, Status.FAILED, "a crash")]}
    rows = campaign(monkeypatch, answers)([Way(name, name) for name in "abc"]).rows
    assert [(item.status, item.reason) for item in rows] == [
        (Status.RAN, ""),
        (Status.OUT_OF_MEMORY, "no memory"),
        (Status.FAILED, "a crash"),
    ]
    assert rows[0].rounds_ms == ((1.0, 1.0), (1.0, 1.0)) and rows[0].peak_bytes == 7


def test_a_treatment_that_changes_nothing_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = campaign(monkeypatch, {"eager": [READY], "compile": [READY]})
    compiled = Way("compile", "compile", True)
    rows = run([compiled]).rows + run([compiled.treated(Treatment.ONE_GRAPH)]).rows[1:]
    assert [item.status for item in rows] == [Status.RAN, Status.NOT_REACHED]


def test_nothing_is_started_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = campaign(monkeypatch, {}, deadline=0.0)([Way("eager", "eager")]).rows
    assert [(item.status, item.reason) for item in rows] == [(Status.NOT_REACHED, "the time was over")]


def test_a_worker_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    around = Surroundings(tmp_path, tmp_path / "logs")
    worker = Worker({"model": "no such model", "device": "cpu", "way": {}}, "odd", around)
    try:
        answer = worker.ready(60.0)
    finally:
        worker.end()
    assert (answer.status, answer.reason) == (Status.FAILED, "KeyError: 'blocks'")


@pytest.mark.parametrize(("start", "grain", "each"), [(8, 1, 7), (200, 4, 7), (8, 1, 40), (3, 2, 200), (64, 8, 999)])
def test_search_finds_the_largest_batch_to_within_the_grain(start: int, grain: int, each: int) -> None:
    tried: dict[int, int | None] = {}
    while (batch := next_batch(tried, start=start, grain=grain, cap_bytes=1000)) is not None:
        assert batch not in tried and len(tried) < 25
        peak = 100 + each * batch
        tried[batch] = peak if peak <= 1000 else None
    largest = 900 // each
    assert largest - grain < (largest_fit(tried) or 0) <= largest


def test_search_halves_where_peaks_tell_nothing() -> None:
    tried: dict[int, int | None] = {}
    while (batch := next_batch(tried, start=8, grain=1, cap_bytes=1000)) is not None:
        assert len(tried) < 25
        tried[batch] = 950 if batch <= 165 else None
    assert largest_fit(tried) == 165


def test_batches_are_searched_until_memory_ends(tmp_path: Path) -> None:
    ended: list[int] = []

    def tried(way: Way, batch: int) -> tuple[Answer, Any]:
        if batch > 40:
            return Answer(None, Status.OUT_OF_MEMORY, "no memory"), None
        peak = {"peak_bytes": 10 * batch, "reserved_bytes": None}
        later = Answer({"step_ms": [7.0], **peak})
        worker = SimpleNamespace(end=lambda: ended.append(batch), time=lambda steps, limit: later)
        return Answer({"step_ms": [2.0 * batch], **peak}), worker

    conditions: Any = SimpleNamespace(tried=tried, grain=1, cap_bytes=1000, peak_within=lambda answer: (
        None if answer.fields is None else answer.fields["peak_bytes"]))  # fmt: skip
    kept: list[Found] = []
    candidate = Candidate(Way("eager", "eager"), Found("eager", "eager"))
    candidate.found = search(candidate, 8, conditions, kept.append)
    assert candidate.found.batch == kept[-1].batch == 40
    assert 40 not in ended, "the largest waits to be timed"
    conditions.steps, conditions.deadline = 1, 0.0
    assert timed(candidate, conditions).step_ms == 7.0


def test_a_batch_fits_on_a_cpu_where_its_measured_peak_does(tmp_path: Path) -> None:
    around = Surroundings(tmp_path, tmp_path / "logs")
    conditions = Conditions("mlp-tiny", "cpu", 10**6, 1, 1, time.monotonic() + 100, around)
    answer, worker = conditions.tried(Way("eager", "eager"), 64)
    assert worker is not None
    worker.end()
    assert answer.fields is not None and answer.fields["step_ms"]
    peak = conditions.peak_within(answer)
    assert peak is not None and 0 < peak <= 10**6
    assert replace(conditions, cap_bytes=peak - 1).peak_within(answer) is None


def test_bars_set_ours_against_the_best_of_the_others() -> None:
    def found(name: str, batch: int, ms: float) -> Found:
        return Found(name, name, {batch: 1, batch + 1: None}, step_ms=ms)

    eager, block = found("eager", 14, 200.0), found("compile-block", 120, 1000.0)
    lines = list(bars([eager, block, found("compile-block+one-graph", 110, 900.0), found("ours", 170, 1500.0)]))
    assert [line.split(": ")[-1] for line in lines] == ["met", "met", "not met"]
    assert lines[1].startswith("batch over compiled checkpointing's: 1.42")
