"""Steps under `remat.dtr`: eager's gradients, within the budget, and nothing left of it."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.unit.pytorch.online.dynamic_models import MODELS
from tests.unit.pytorch.random_module import WIDTH, RandomModule
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import remat
from remat.core.validate import validate
from remat.pytorch._compat.modes import modes_active
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.online.values import Geometry


def run(model: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return loss.detach()


def state(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {f"{name}.grad": item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    found |= {name: item.detach().clone() for name, item in model.named_buffers()}
    return {**found, "loss": loss, "generator": torch.get_rng_state()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def activation_bytes(step: Callable[[], Any]) -> int:
    """What a step needs beyond what is there when it begins."""
    measured = measure_once(step)
    return measured.peak_bytes - measured.timeline[0]


@pytest.mark.parametrize("build", MODELS)
def test_half_the_activations_give_the_same_gradients(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, args = build()
    expected = state(model, run(model, args))
    model.zero_grad()
    plain = activation_bytes(lambda: run(model, args))
    budget = plain // 2

    def step() -> torch.Tensor:
        with remat.dtr(budget) as online:
            loss = run(model, args)
        contexts.append(online)
        return loss

    contexts: list[Any] = []
    found = state(model, step())
    assert_same(found, expected)
    assert contexts[0].evictions > 0 and contexts[0].recomputations > 0
    assert contexts[0].peak_bytes <= budget
    model.zero_grad()
    assert activation_bytes(step) <= budget


def layers(choices: list[int]) -> nn.Module:
    made = {
        0: lambda: nn.Linear(16, 16),
        1: nn.Tanh,
        2: lambda: nn.ReLU(inplace=True),
        3: lambda: nn.Dropout(0.3),
        4: lambda: nn.BatchNorm1d(16),
        5: lambda: nn.LayerNorm(16),
        6: lambda: nn.Dropout(0.3, inplace=True),
        7: InPlace,
        8: Views,
        9: Checkpointed,
        10: nn.SiLU,
    }
    return nn.Sequential(nn.Linear(16, 16), *(made[choice]() for choice in choices))


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.add(1).mul_(x)
        y = torch.zeros_like(x).add_(z).clamp_(-3, 3)
        y[:, 0].sub_(1)
        return y + z


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1)
        return torch.cat([left.sigmoid() * right, right.t().contiguous().t().exp().clamp(max=3)], 1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@settings(max_examples=60)
@given(choices=st.lists(st.integers(0, 10), min_size=1, max_size=14), share=st.floats(0.1, 0.9))
def test_random_modules_have_the_bits_of_eager(choices: list[int], share: float) -> None:
    torch.manual_seed(0)
    plain = Mean(layers(choices))
    online = copy.deepcopy(plain)
    x = torch.randn(32, 16)
    try:
        expected = state(plain, run(plain, (x,)))
    except RuntimeError as error:
        # What was saved is overwritten: eager refuses that.
        assert "modified by an inplace operation" in str(error)
        reject()
    with remat.dtr(10**9) as whole:
        run(copy.deepcopy(online), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with remat.dtr(max(1, int(share * whole.peak_bytes))):
            loss = run(online, (x,))
    assert_same(state(online, loss), expected)


def test_constant_that_is_written_to_is_copied_first() -> None:
    x, weight = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() @ weight).tanh()
        z = (y * y).sigmoid()
        x.add_(1)
        return ((z @ weight).tanh() * x).mean()

    step(x.clone()).backward()
    expected, weight.grad = weight.grad, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with remat.dtr(1) as online:
            step(x.clone()).backward()
    assert online.recomputations > 0
    assert torch.equal(weight.grad, expected)


def test_nothing_is_left_after_an_error() -> None:
    model, args = MODELS[3]()

    class Mine(Exception):
        pass

    with pytest.raises(Mine), remat.dtr(10**6):
        model(*args)
        raise Mine
    assert not modes_active()
    leaf = torch.ones(3, requires_grad=True)
    assert leaf.exp().grad_fn._saved_result.shape == (3,)


def test_step_is_freed_when_it_is_over() -> None:
    model, args = MODELS[2]()
    with remat.dtr(10**9) as online:
        model(*args).backward()
    del model, args
    gc.collect()
    assert online.memory.live_bytes == 0


def test_backward_may_come_after_the_context() -> None:
    model, args = MODELS[3]()
    expected = state(model, run(model, args))
    model.zero_grad()
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with remat.dtr(10**5) as online:
            loss = model(*args)
    assert online.evictions > 0
    loss.backward()
    assert_same(state(model, loss.detach()), expected)


def test_graph_can_be_kept_for_a_second_backward() -> None:
    model, args = MODELS[3]()
    loss = model(*args)
    loss.backward(retain_graph=True)
    loss.backward()
    expected = [item.grad for item in model.parameters()]
    model.zero_grad()
    with remat.dtr(700_000) as online:
        loss = model(*args)
        loss.backward(retain_graph=True)
        loss.backward()
    assert online.evictions > 0
    assert all(map(torch.equal, expected, (item.grad for item in model.parameters())))


def test_mixed_precision_is_computed_again_as_it_was() -> None:
    torch.manual_seed(0)
    model = Mean(layers([0, 1, 0, 10, 0, 5, 0, 1]))
    x = torch.randn(256, 16)

    def step() -> torch.Tensor:
        torch.manual_seed(1)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
        return loss.detach()

    expected = state(model, step())
    model.zero_grad()
    with remat.dtr(10**9) as whole:
        step()
    with remat.dtr(int(0.6 * whole.peak_bytes)) as online:
        loss = step()
    assert online.recomputations > 0
    assert_same(state(model, loss), expected)


def test_budget_that_is_too_small_is_told_and_gone_beyond() -> None:
    model, args = MODELS[3]()
    with pytest.warns(UserWarning, match="is too small for what cannot be given up here"), remat.dtr(1000):
        run(model, args)


def test_trace_is_a_problem_and_shows_how_far_above_the_optimum_it_was() -> None:
    model, args = MODELS[3]()
    with remat.dtr(10**9) as whole:
        run(model, args)
    with remat.dtr(whole.peak_bytes // 2) as online:
        run(model, args)
    problem = online.problem()
    assert problem.budget_bytes == whole.peak_bytes // 2
    assert any(op.backward for op in problem.graph.ops)
    found = online.hindsight(time_limit=2)
    validate(problem.with_budget(found.budget_bytes), found.solution.schedule)
    assert found.online_ns >= found.solution.bound_ns
    assert found.excess >= 0 or found.solution.gap > 0
    assert "above" in str(found)


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(remat.BudgetError, match="cannot know the peak"):
        remat.dtr("0.5x")
    with pytest.raises(remat.RematError, match="no trace to solve"):
        with remat.dtr(10) as online:
            pass
        online.problem()
    with remat.dtr(10) as online, pytest.raises(remat.RematError, match="in use already"):
        online.__enter__()
    with remat.dtr(10) as online, pytest.raises(remat.RematError, match="ask after it"):
        online.problem()


def test_embedding_gradients_and_losses_by_index_are_followed() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 32), nn.Linear(32, 50)
    words = torch.randint(50, (64, 8))

    def step() -> torch.Tensor:
        x = table(words)
        for _ in range(4):
            x = F.gelu(x) + x
        return F.cross_entropy(head(x).flatten(0, 1), words.flatten())

    step().backward()
    expected = [table.weight.grad, head.weight.grad]
    _drop_gradients(table, head)
    with remat.dtr(10**9) as whole:
        step().backward()
    _drop_gradients(table, head)
    with remat.dtr(int(0.7 * whole.peak_bytes)) as online:
        step().backward()
    assert online.evictions > 0
    assert torch.equal(table.weight.grad, expected[0]) and torch.equal(head.weight.grad, expected[1])


def _drop_gradients(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad()


def test_parts_of_a_tensor_that_are_written_one_by_one_are_not_computed_again() -> None:
    """As an LSTM's cell does: four columns of one matrix, each bent in place."""
    model, x = nn.LSTMCell(16, 16), torch.randn(8, 16)
    with remat.dtr(10**9) as online:
        hidden, cell = model(x)
        (hidden.mean() + cell.square().mean()).backward()
    assert online.evictions == online.recomputations == 0


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [
        ((slice(None), slice(0, 4)), (slice(None), slice(4, 8)), True),
        ((slice(None), slice(0, 5)), (slice(None), slice(4, 8)), False),
        ((slice(0, 2), slice(None)), (slice(2, 4), slice(None)), True),
        ((slice(0, 4, 2), slice(None)), (slice(0, 3), slice(None)), False),
        ((slice(1, 3), slice(2, 4)), (slice(2, 6), slice(4, 8)), True),
    ],
)
def test_parts_are_told_apart(first: Any, second: Any, apart: bool) -> None:
    whole = torch.zeros(8, 8)
    assert Geometry.of(whole[first]).is_apart_from(Geometry.of(whole[second])) == apart
    if apart:
        whole[first] = 1
        assert not whole[second].any()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(12))
def test_random_models_have_the_bits_of_eager_at_every_budget(seed: int, share: float) -> None:
    plain = RandomModule(seed, depth=2 + seed)
    model = copy.deepcopy(plain)
    torch.manual_seed(seed)
    x = torch.randn(32, WIDTH)
    expected = state(plain, run(plain, (x,)))
    with remat.dtr(10**9) as whole:
        run(copy.deepcopy(model), (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with remat.dtr(int(share * whole.peak_bytes)) as online:
            loss = run(model, (x,))
    assert online.evictions > 0
    assert_same(state(model, loss), expected)


@pytest.mark.filterwarnings("ignore:The budget of")
def test_an_op_that_asks_for_the_grad_mode_runs_again_as_before() -> None:
    """oneDNN's recurrent layer returns what its backward reads only while gradients are enabled."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)
            self.last = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.between(self.first(x)[0])))[0].square().mean()

    plain, x = Stacked(), torch.randn(4, 16, 8)
    model = copy.deepcopy(plain)
    plain(x).backward()
    with remat.dtr("60KiB") as kept:
        model(x).backward()
    assert kept.recomputations > 0
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
