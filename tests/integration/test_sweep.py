"""Curves and largest batches on real models, held against what really running them needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import remat
from remat import zoo
from remat.core.budget import parse_budget
from remat.pytorch.explore.max_batch import BatchSearch, find_max_batch
from remat.pytorch.explore.module_blocks import checkpointed
from remat.zoo import Example

SIZES: dict[str, dict[str, float]] = {
    "gpt": {"depth": 2, "length": 16, "width": 32},
    "unet": {"depth": 2, "side": 16},
}
START = 8


def build(name: str, batch: int) -> Example:
    return zoo.build(name, batch=batch, **SIZES[name])


def test_verified_curve_holds_in_measured_bytes() -> None:
    example = build("gpt", 8)
    curve = remat.pareto(example.model, *example.args, budgets=4, solvers=("full", "none"), verify=True, time_limit=1)
    assert len(curve.points) == 4
    for point in (*curve.points, *curve.baselines):
        assert point.measured_peak_bytes is not None
        assert point.measured_peak_bytes <= point.budget_bytes
        assert point.measured_peak_bytes == pytest.approx(point.peak_bytes, rel=0.002)
    times = [point.time_ns for point in curve.points]
    assert times == sorted(times)


def test_curve_at_budgets_that_are_named() -> None:
    example = build("gpt", 4)
    curve = remat.pareto(example.model, *example.args, budgets=("0.8x", "0.9x"), solvers=(), time_limit=1)
    shares = [point.budget_bytes / curve.plain_peak_bytes for point in curve.points]
    assert shares == pytest.approx([0.9, 0.8], abs=1e-3)


def test_curve_where_no_budget_fits_names_the_smallest() -> None:
    example = build("gpt", 4)
    with pytest.raises(remat.InfeasibleBudget, match="None of the 2 budgets fits") as caught:
        remat.pareto(example.model, *example.args, budgets=(1000, 2000), solvers=(), time_limit=1)
    assert caught.value.min_budget > 2000


def measured(example: Example, way: str, budget: int) -> int:
    """The real peak of a step, or the smallest budget that planning named."""
    if way == "plain":
        return remat.measure(example.model, *example.args).peak_bytes
    if way == "checkpointed":
        with checkpointed(example.model) as model:
            return remat.measure(model, *example.args).peak_bytes
    model = remat.optimize(example.model, budget, time_limit=1)
    try:
        model(*example.args).backward()
    except remat.InfeasibleBudget as error:
        return error.min_budget
    model.zero_grad(set_to_none=True)
    return remat.measure(model, *example.args).peak_bytes


def true_limit(peak: Callable[[int], int], guess: int, budget: int) -> int:
    """The largest batch whose real step stays within the budget, searched around `guess`."""
    size = guess
    while size and peak(size) > budget:
        size -= 1
    while size >= guess and peak(size + 1) <= budget:
        size += 1
    return size


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_limits_are_off_by_at_most_one_from_what_really_fits(name: str) -> None:
    found = find_max_batch(lambda size: build(name, size), START, BatchSearch(parse_budget("2x"), time_limit_s=1), name)
    budget = found.budget_bytes
    assert found.checkpointed is not None
    assert found.real_steps <= 2
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= budget
    predicted = {"plain": found.plain.size, "checkpointed": found.checkpointed.size, "ours": found.predicted}
    for way, size in predicted.items():
        truth = true_limit(lambda batch, way=way: measured(build(name, batch), way, budget), size, budget)
        assert abs(size - truth) <= 1, f"{way}: predicted {size}, really {truth}"


@pytest.mark.long
def test_longest_sequence_is_confirmed() -> None:
    def sized(length: int) -> Example:
        return zoo.build("gpt", batch=2, depth=2, width=32, length=length)

    found = find_max_batch(sized, 64, BatchSearch(parse_budget("2x"), axis="length", grid=16, time_limit_s=5), "gpt")
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= found.budget_bytes
    assert found.predicted == found.size
    assert found.plain.size < found.size
