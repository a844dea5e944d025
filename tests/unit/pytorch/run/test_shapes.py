"""Steps of many shapes: one capture, plans for ranges of sizes, and the bits of plain PyTorch at each of them."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F

import remat
from remat.core.graph import Graph, Op
from remat.core.schedule import Schedule, plain_schedule
from remat.errors import RematError
from remat.pytorch.costs import op_costs
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.run.optimize import session_of
from remat.pytorch.run.shapes.buckets import PER_DOUBLING, bucket_end, bucket_of, sample_points
from remat.pytorch.run.shapes.pool import SchedulePool


class Writer(nn.Module):
    """Attention, dropout, a norm and a loss, for any length."""

    def __init__(self, width: int = 32, words: int = 50) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for norm, mix, out in zip(self.norms, self.mix, self.out, strict=True):
            batch, length, width = x.shape
            query, key, value = mix(norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + F.dropout(F.gelu(out(mixed.transpose(1, 2).reshape(batch, length, width))), 0.1)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Squared(nn.Module):
    """Takes another way for one of its lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return (x.exp() if x.shape[1] == 12 else x.square()).mean()


def batch(size: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (size, length), generator=torch.Generator().manual_seed(length))


def gradients(model: nn.Module, step: Any, *args: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    loss = step(*args)
    loss.backward()
    return [loss.detach(), *(item.grad.clone() for item in model.parameters())]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@given(st.integers(1, 10_000))
def test_bucket_ends_at_or_little_beyond_every_size_in_it(size: int) -> None:
    end = bucket_end(size)
    assert size <= end <= size * (1 + 2 / PER_DOUBLING) + 1
    assert bucket_end(end) == end
    assert bucket_end(size + 1) >= end


def test_bucket_stays_within_what_was_declared_and_what_tracing_took_for_granted() -> None:
    assert bucket_of((1000, 3), (1010, 4), lambda sizes: True) == (1010, 3)
    assert bucket_of((1000,), None, lambda sizes: sizes[0] <= 1000) == (1000,)


def test_samples_are_sizes_that_the_graph_may_have() -> None:
    points = sample_points((1024,), lambda sizes: sizes[0] % 8 == 0)
    assert len(points) >= 3 and all(size % 8 == 0 for (size,) in points)
    assert len(sample_points((64, 512), lambda sizes: True)) >= 5, "either size is also changed alone"


def test_one_capture_serves_every_length_with_equal_bits_within_the_budget() -> None:
    torch.manual_seed(0)
    plain = Writer()
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "0.6x", dynamic={"length": (4, 128)}, progress=False, time_limit=0.3)
    for length in (9, 128, 64, 65, 33, 100):
        expected = gradients(plain, plain, batch(3, length))
        assert are_equal(gradients(model, step, batch(3, length)), expected), length
    session = session_of(step)
    assert len(session.graphs) == 1, "nothing was captured twice"
    allowed = remat.plan_of(step).budget_bytes
    for length in (128, 100, 65):
        model.zero_grad()
        assert measure_once(step, batch(3, length)).peak_bytes <= allowed
    session.transfer.background.wait()


def test_sizes_are_left_open_from_their_second_value_on_for_batch_and_length_alike() -> None:
    torch.manual_seed(0)
    plain = Writer()
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "0.8x", progress=False, time_limit=0.3)
    for size, length in ((4, 24), (3, 40), (5, 18), (2, 80)):
        expected = gradients(plain, plain, batch(size, length))
        assert are_equal(gradients(model, step, batch(size, length)), expected)
    assert len(session_of(step).graphs) == 2, "the first shape, and all others"
    session_of(step).transfer.background.wait()


def test_better_schedule_takes_the_place_of_a_known_one_between_two_steps() -> None:
    torch.manual_seed(0)
    model = Writer()
    step = remat.optimize(model, "0.6x", dynamic={"length": (4, 128)}, progress=False, time_limit=0.3)
    first = gradients(model, step, batch(3, 128))
    session = session_of(step)
    session.transfer.background.wait()
    before = remat.plan_of(step)
    session.transfer.pool.add(before.problem.graph, plain_schedule(before.problem.graph))
    assert are_equal(gradients(model, step, batch(3, 128)), first)
    after = remat.plan_of(step)
    assert after.predicted_time <= before.predicted_time
    assert after.predicted_peak <= after.budget_bytes


def test_model_that_depends_on_one_length_keeps_its_way_there() -> None:
    torch.manual_seed(0)
    plain = Squared()
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "1x", progress=False, time_limit=0.3)
    for length in (10, 11, 12, 13):
        x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
        assert are_equal(gradients(model, step, x), gradients(plain, plain, x))


def test_every_shape_is_captured_for_itself_where_that_is_asked_for() -> None:
    model = Squared()
    step = remat.optimize(model, "1x", dynamic=False, progress=False, time_limit=0.3)
    for length in (5, 6, 7):
        step(torch.randn(4, length, 8)).backward()
    assert len(session_of(step).graphs) == 3


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"width": (1, 2)}, "There is no axis 'width' to declare; it is one of batch, length."),
        ({"length": (8, 2)}, "The bounds of 'length' are (8, 2); give its smallest and largest size"),
        ({"length": 8}, "The bounds of 'length' are 8; give its smallest and largest size"),
        ("length", "dynamic='length' is none of True, False and bounds"),
    ],
)
def test_bounds_that_say_nothing_are_refused(dynamic: Any, words: str) -> None:
    with pytest.raises(RematError) as caught:
        remat.optimize(Squared(), "1x", dynamic=dynamic)
    assert str(caught.value).startswith(words)


def test_first_shape_outside_the_bounds_is_refused_and_a_later_one_told() -> None:
    model = Squared()
    step = remat.optimize(model, "1x", dynamic={"length": (4, 8)}, progress=False, time_limit=0.3)
    with pytest.raises(RematError, match="This call has a length of 9, outside of the declared 4 to 8"):
        step(torch.randn(2, 9, 8))
    step(torch.randn(2, 8, 8)).backward()
    with pytest.warns(UserWarning, match="This call has a length of 9, outside of the declared 4 to 8"):
        step(torch.randn(2, 9, 8)).backward()


GRAPH = Graph((Op("a", (), (0,)), Op("b", (0,), (1,)), Op("c", (0, 1), (2,), backward=True)), 3, (2,))
"""Two ops forward, one back."""


def test_schedules_outlive_the_run_that_found_them(tmp_path: Path) -> None:
    again = Schedule((0, 1, 0, 2))
    assert SchedulePool(tmp_path).add(GRAPH, again)
    assert SchedulePool(tmp_path).of(GRAPH) == [plain_schedule(GRAPH), again]
    assert not SchedulePool(tmp_path).add(GRAPH, again), "it is known already"


@pytest.mark.parametrize(
    ("steps", "words"), [([2, 0, 1], "is no schedule of the graph"), ([0, 7], "has an op that the graph has not")]
)
def test_file_with_something_else_than_schedules_is_told_of(tmp_path: Path, steps: list[int], words: str) -> None:
    SchedulePool(tmp_path).add(GRAPH, Schedule((0, 1, 0, 2)))
    (file,) = tmp_path.glob("*.json")
    damaged = json.loads(file.read_text())
    damaged["schedules"][0]["steps"] = steps
    file.write_text(json.dumps(damaged))
    with pytest.warns(UserWarning, match=words):
        assert SchedulePool(tmp_path).of(GRAPH) == [plain_schedule(GRAPH)]


class Places(nn.Module):
    """Asks its input for its shape and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.arange(x.shape[1]).float()[:, None] * self.layers[0].bias
        for layer in self.layers:
            found = layer(found).tanh()
        return found.sum()


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_size_that_comes_in_as_a_number_alone_is_left_open(
    is_measured: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not is_measured:
        monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(op_costs, "_measure_call", _refuse)
    plain = Places()
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "1MiB", progress=False, time_limit=0.3)
    with warnings.catch_warnings():
        warnings.filterwarnings("default" if is_measured else "ignore", message=".*could not be measured")
        for length in (24, 40, 18, 200):
            given = torch.randn(2, length)
            assert are_equal(gradients(model, step, given), gradients(plain, plain, given))
    session = session_of(step)
    assert len(session.graphs) == 2, "one for the first length, one for all others"
    session.transfer.background.wait()


def _refuse(*_: Any) -> None:
    raise RuntimeError("not here")


def test_ops_of_a_size_that_comes_while_a_step_is_watched_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(op_costs, "_estimate_all", lambda *_: pytest.fail("an op was estimated"))
    plain = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = copy.deepcopy(plain)
    step = remat.optimize(model, "64MiB", progress=False)
    # With the loss outside, the second step is watched.
    for rows in (4, 6, 8, 6):
        x = torch.randn(rows, 3, 8)
        found = gradients(model, lambda x: step(x).square().mean(), x)
        assert are_equal(found, gradients(plain, lambda x: plain(x).square().mean(), x))
