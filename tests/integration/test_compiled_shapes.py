"""Compiled steps whose sizes change from call to call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.errors import InfeasibleBudget
from remat.inductor.session import CompiledSession
from remat.inductor.shapes.open_inputs import OpenInputs
from remat.pytorch.run.optimize import session_of
from remat.pytorch.run.settings import SizesMatter

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_kernels")]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Reader(nn.Module):
    """Positions and a loss over labels, as decoders have them."""

    def __init__(self, vocabulary: int = 24, width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(2)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tokens(length: int, count: int = 4) -> torch.Tensor:
    return torch.randint(24, (count, length), generator=torch.Generator().manual_seed(length))


def train(step: Any, model: nn.Module, batch: torch.Tensor) -> Any:
    loss = step(batch)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


def measured(step: Any, model: nn.Module, batch: torch.Tensor) -> int:
    def run() -> None:
        step(batch).backward()
        model.zero_grad()

    return remat.measure(run).peak_bytes


class Training:
    """A compiled step beside the plain one."""

    def __init__(self, budget: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = Reader()
        self.model = copy.deepcopy(self.plain)
        self.step = remat.optimize(self.model, budget, compiler="inductor", time_limit=2, progress=False, **options)

    @property
    def session(self) -> CompiledSession:
        found = session_of(self.step)
        assert isinstance(found, CompiledSession)
        return found

    @property
    def ends(self) -> list[tuple[int, ...] | None]:
        """How far each compilation goes; None for those of one shape."""
        return [graph.opened.most if graph.opened is not None else None for graph in self.session.graphs]

    def check(self, *lengths: int) -> None:
        for length in lengths:
            found = train(self.step, self.model, tokens(length))
            torch.testing.assert_close(found, train(self.plain, self.plain, tokens(length)), rtol=1e-4, atol=1e-6)


def test_one_compilation_runs_at_every_size_of_its_range_within_the_budget() -> None:
    training = Training("0.7x")
    training.check(48, 100)
    assert training.ends == [None, (128,)]
    plan = remat.plan_of(training.step)
    assert plan.compiled is not None and not plan.compiled.is_default
    training.check(128, 3, 77)
    assert training.ends == [None, (128,)], "sizes of the range are compiled once"
    peaks = [measured(training.step, training.model, tokens(length)) for length in (20, 90, 128)]
    assert peaks == sorted(peaks) and peaks[-1] <= plan.budget_bytes
    assert abs(peaks[-1] - plan.predicted_peak) <= 0.02 * peaks[-1], "it is planned for its largest sizes"


def test_declared_sizes_are_compiled_once_and_what_is_outside_goes_on() -> None:
    training = Training("0.7x", dynamic={"length": (2, 96)})
    training.check(40, 96, 12)
    assert training.ends == [(96,)]
    with pytest.warns(UserWarning, match="outside of the declared 2 to 96"):
        training.check(100)
    assert training.ends == [(96,), (128,)]


@pytest.mark.long
def test_a_budget_that_the_whole_range_does_not_fit_into_is_planned_in_shorter_ones() -> None:
    short = Training("0.75x")
    short.check(65)
    training = Training(remat.plan_of(short.step).budget_bytes)
    training.check(40, 65)
    assert training.ends[0] is None and training.ends[-1] == (72,), "128 would not fit, and 72 does"
    training.check(71)
    assert measured(training.step, training.model, tokens(71)) <= remat.plan_of(training.step).budget_bytes


def test_what_cannot_be_compiled_for_a_range_is_compiled_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise SizesMatter("An op of this step wants its sizes.")

    monkeypatch.setattr(OpenInputs, "stand_ins", refuse)
    training = Training("1x")
    training.check(16, 20, 16, 20)
    assert training.session.fixed_because == "An op of this step wants its sizes."
    assert len([end for end in training.ends if end is None]) == 3, "the first of all is behind one that is left open"


@pytest.mark.long
def test_budget_that_no_size_fits_into_is_refused_at_the_first_call_only() -> None:
    training = Training("0.7x")
    training.check(16, 20)
    remat.set_budget(training.step, 1000)
    with pytest.raises(InfeasibleBudget):
        training.step(tokens(20))
    remat.set_budget(training.step, "2x")
    training.check(16, 20, 30)
