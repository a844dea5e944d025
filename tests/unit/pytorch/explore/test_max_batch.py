"""The largest size that fits: found by few looks, confirmed by one step, refused where nothing fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn

import remat
from remat.core.budget import Budget, BudgetUnit
from remat.core.search.largest import largest
from remat.pytorch.explore.max_batch import (
    BatchSearch,
    find_max_batch,
    max_batch_size,
    sample_sizes,
)
from remat.zoo import Example
from remat.zoo.example import as_example


@given(st.integers(0, 3000), st.integers(1, 4000), st.integers(1, 7))
def test_largest_is_found_from_any_guess_in_few_looks(limit: int, guess: int, grid: int) -> None:
    looks: list[int] = []

    def fits(size: int) -> bool:
        looks.append(size)
        return size <= limit

    assert largest(fits, guess, grid) == limit // grid * grid
    assert all(size % grid == 0 and size > 0 for size in looks)
    assert len(looks) <= 2 + 2 * (abs(limit - guess) // grid + 1).bit_length() + 2


def test_good_guess_is_settled_in_two_looks() -> None:
    looks: list[int] = []

    def fits(size: int) -> bool:
        looks.append(size)
        return size <= 351

    assert largest(fits, 351, 1) == 351
    assert looks == [351, 352]


def test_memory_that_never_grows_is_an_error() -> None:
    with pytest.raises(remat.RematError, match="does not grow along this axis"):
        largest(lambda size: True, 8, 1)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_samples_are_four_sizes_that_laws_can_be_checked_with(start: int, grid: int) -> None:
    sizes = sample_sizes(start, grid)
    assert len(set(sizes)) == len(sizes) == 4
    assert sizes == tuple(sorted(sizes))
    assert sizes[0] >= max(2, grid)
    assert start in sizes or start < max(2, grid)


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_model_with_its_batch_is_confirmed_by_one_real_step() -> None:
    found = max_batch_size(Net(), torch.randn(64, 32), budget="2x", grid=8, time_limit=1)
    assert found.size == found.predicted
    assert found.real_steps == 1
    assert found.measured_peak_bytes is not None
    assert found.measured_peak_bytes == found.ours.peak_bytes <= found.budget_bytes
    assert found.checkpointed is not None
    assert 64 <= found.plain.size <= found.checkpointed.size <= found.size
    assert found.size % 8 == 0


def test_step_that_needs_more_than_its_plan_is_run_one_size_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat.pytorch.explore import max_batch

    real, ran = max_batch.measure_once, []

    def more(*args: object, **kwargs: object) -> remat.Measurement:
        measured = real(*args, **kwargs)
        ran.append(len(args[1]))
        return measured if len(ran) > 1 else type(measured)(10**12, {}, 0.0, ())

    monkeypatch.setattr(max_batch, "measure_once", more)
    found = max_batch_size(lambda size: (Net(2), torch.randn(size, 32)), budget="2x", start=32, time_limit=1)
    assert found.real_steps == 2
    assert ran == [found.size + 1, found.size]
    assert found.predicted == found.size + 1


def test_budget_below_one_sample_names_the_smallest() -> None:
    with pytest.raises(remat.InfeasibleBudget, match="a batch of 1 needs") as caught:
        max_batch_size(Net(1), torch.randn(8, 32), budget=2000, time_limit=1)
    smallest = caught.value.min_budget
    assert remat.plan(Net(1), torch.randn(1, 32), budget=smallest).predicted_peak <= smallest


def test_optimizer_state_is_reserved() -> None:
    budget = Budget(60_000.0, BudgetUnit.BYTES)
    build = lambda size: Example(Net(1), (torch.randn(size, 32),))  # noqa: E731
    without = find_max_batch(build, 16, BatchSearch(budget, time_limit_s=1), "net")
    adam = lambda model: (torch.optim.AdamW(model.parameters()),)  # noqa: E731
    reserved = find_max_batch(build, 16, BatchSearch(budget, time_limit_s=1, optimizers=adam), "net")
    assert reserved.plain.size < without.plain.size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": "depth"}, "There is no axis 'depth'"),
        ({"grid": 0}, "A grid of 0 has no sizes"),
        ({"budget": "lots"}, "Cannot read the budget"),
    ],
)
def test_bad_request_is_one_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(remat.RematError, match=message):
        max_batch_size(Net(), torch.randn(8, 32), **{"budget": "2x", **options})


def test_function_must_return_a_model_and_its_arguments() -> None:
    with pytest.raises(remat.RematError, match="returned int"):
        as_example(3, "The function")
    assert as_example((len, "x"), "The function").args == ("x",)
