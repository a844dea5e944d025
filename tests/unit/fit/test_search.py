"""The search: the best of all combinations, each within the memory there is, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.errors import FileFormatError, InfeasibleBudget, RematError, UnknownName
from remat.fit.cluster import find_cluster
from remat.fit.grow import check_growth, grow
from remat.fit.known_links import find_link, known_links
from remat.fit.levers import Levers, OptimizerKind, Recomputation, Zero
from remat.fit.outcomes import Evaluator, Traces
from remat.fit.search import LeverSearch

MEMORY = 40 << 20


@pytest.fixture(scope="module")
def example() -> zoo.Example:
    return zoo.build("gpt", depth=6, length=32, dropout=0.0)


@pytest.fixture(scope="module")
def found(example: zoo.Example) -> Any:
    return remat.fit(example.model, *example.args, gpu="T4", gpus=4, batch=64, memory=MEMORY, time_limit=0.5)


def test_best_fits_and_nothing_that_was_looked_at_is_faster(found: Any) -> None:
    assert found.best.peak_bytes <= found.cluster.capacity_bytes <= MEMORY
    assert found.best.seconds_per_sample == min(item.seconds_per_sample for item in found.found.outcomes)
    assert all(item.levers.batch == 64 and item.levers.is_runnable for item in found.found.outcomes)


def test_search_finds_what_looking_at_everything_finds(found: Any) -> None:
    """Without plans, whose search takes its time: pruning must not lose the best."""
    evaluator = found.evaluator
    search = LeverSearch(evaluator, batch=64, allowed=frozenset({"fp16", "zero", "accumulate"}))
    everything = [evaluator.at_once(levers) for levers in search.combinations()]
    best = min((item.seconds_per_sample for item in everything if item.fits), default=None)
    assert best is not None
    assert search.run().outcomes[0].seconds_per_sample == best


def test_says_why_and_shows_it(found: Any, tmp_path: Path) -> None:
    assert found.levers.label in found.explain()
    assert found.levers.precision.value in found.table()
    page = found.to_html(tmp_path / "fit.html").read_text()
    assert "<svg" in page and "T4" in page and "http" not in page.replace("http-equiv", "")


def test_optimistic_is_never_beaten(found: Any) -> None:
    for item in found.found.outcomes:
        assert found.evaluator.optimistic(item.levers).seconds_per_sample <= item.seconds_per_sample * (1 + 1e-9)


def test_state_that_exceeds_all_gpus_is_refused_with_what_is_needed(example: zoo.Example) -> None:
    with pytest.raises(InfeasibleBudget, match=r"Nothing fits 1 x T4 .* needs .* on each") as refused:
        remat.fit(example.model, *example.args, gpu="T4", batch=8, memory=1 << 20, allow="bf16")
    assert refused.value.min_budget > 1 << 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(gpu="X1"), "No device is called 'X1'; known are"),
        (dict(gpu="T4", link="wire"), "No link is called 'wire'; known are NVLink2"),
        (dict(gpu="T4", allow="magic"), "No lever is called 'magic'; known are"),
        (dict(gpu="T4", optimizer="lion"), "No optimizer is called 'lion' here"),
        (dict(gpu="T4", gpus=3, batch=16), "A batch of 16 cannot be divided among 3 ranks"),
        (dict(gpu="T4", gpus=0), "give 1 or more"),
    ],
)
def test_bad_input_is_one_sentence(example: zoo.Example, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RematError, match=words):
        remat.fit(example.model, *example.args, **options)


def test_nothing_but_modules_are_fitted() -> None:
    with pytest.raises(RematError, match="fit needs a module"):
        remat.fit(print, gpu="T4")  # type: ignore[arg-type]


def test_ranks_that_are_not_here_are_named(found: Any, example: zoo.Example) -> None:
    optimizer = torch.optim.AdamW(example.model.parameters())
    with pytest.raises(RematError, match="is for 4 ranks, and here are 1"):
        found.apply(example.model, optimizer)


def test_applied_winner_trains(example: zoo.Example) -> None:
    made = zoo.build("mlp", batch=8)
    found = remat.fit(made.model, *made.args, gpu="cpu", batch=8, allow="recompute,accumulate")
    step = found.apply(made.model, torch.optim.AdamW(made.model.parameters(), lr=1e-2))
    losses = [float(step.train_step(*made.args)) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_accumulation_gives_the_gradients_of_the_whole_batch() -> None:
    from remat.fit.apply import set_up

    weights = []
    for levers in (Levers(micro_batch=8), Levers(micro_batch=2, accumulation=4)):
        made = zoo.build("gpt", batch=8, depth=2, length=16, dropout=0.0)
        step = set_up(made.model, torch.optim.SGD(made.model.parameters(), lr=0.1), levers)
        step.train_step(*made.args)
        weights.append(torch.cat([item.detach().flatten() for item in made.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def test_links_are_extended_by_file(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(
        '{"format": "remat-links", "version": 1, "links": [{"name": "string", "gigabytes_per_second": 2, '
        '"microseconds": 7}]}'
    )
    assert find_link("STRING", known_links([file])).bytes_per_s == 2e9
    file.write_text(file.read_text().replace(": 2,", ": 0,"))
    with pytest.raises(FileFormatError, match="must be above 0"):
        known_links([file])


def test_collectives_between_machines_use_the_slower_link() -> None:
    cluster = find_cluster("H100-80GB", 64)
    assert cluster.link(8).bytes_per_s == find_link("NVLink4").bytes_per_s
    assert cluster.link(64).bytes_per_s == find_link("InfiniBand-400").bytes_per_s


def test_grows_to_the_last_layer_that_fits(example: zoo.Example) -> None:
    cluster = find_cluster("T4", 1, memory_bytes=MEMORY)
    traces = Traces(example.model, example.args, example.kwargs, "T4")

    def at(size: int) -> LeverSearch:
        return LeverSearch(
            Evaluator(traces, cluster, 0.2, layers=size), OptimizerKind.ADAMW, frozenset({"fp16"}), batch=4
        )

    found = grow("layers", at, 6)
    assert found is not None and found.outcome.fits
    wider = replace(found.outcome.levers, recomputation=Recomputation.PER_BLOCK, budget_bytes=None)
    assert at(found.size + 1).evaluator.at_once(wider).peak_bytes > cluster.capacity_bytes
    with pytest.raises(UnknownName, match="choose one of layers, width, batch, sequence"):
        check_growth("heads")


def test_deep_models_are_planned_by_fewer_layers_alike(example: zoo.Example) -> None:
    traces = Traces(example.model, example.args, example.kwargs, "T4")
    evaluator = Evaluator(traces, find_cluster("T4"), 1.0, layers=24)
    plain = evaluator.at_once(Levers(micro_batch=16))
    budget = (plain.peak_bytes + plain.state.resident_bytes) // 2
    levers = Levers(micro_batch=16, recomputation=Recomputation.PLANNED, budget_bytes=budget)
    scaled, exact = evaluator.planned(levers), evaluator.planned(levers, is_exact=True)
    assert (scaled.is_scaled, exact.is_scaled) == (True, False)
    assert max(scaled.peak_bytes, exact.peak_bytes) <= budget
    assert scaled.time.total_s == pytest.approx(exact.time.total_s, rel=0.05)


def test_pipeline_stages_hold_less_and_wait_more(example: zoo.Example) -> None:
    cluster = find_cluster("T4", 2)
    evaluator = Evaluator(Traces(example.model, example.args, example.kwargs, "T4"), cluster)
    together = evaluator.at_once(Levers(world=2, micro_batch=2, accumulation=4, zero=Zero.REPLICATED))
    cut = evaluator.at_once(Levers(world=2, micro_batch=2, accumulation=8, pipeline_stages=2))
    assert cut.state.parameters < together.state.parameters
    assert cut.time.bubble_s > 0 == together.time.bubble_s
