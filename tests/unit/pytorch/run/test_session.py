"""The life of an optimized step, seen through its session: what is captured, watched, planned, and planned again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import remat
from remat.pytorch._compat.memory import profiler_is_running
from remat.pytorch.run.held import MOST_HELD
from remat.pytorch.run.optimize import session_of

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
Step = Callable[[], None]


class Mean(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())))


def optimized(model: nn.Module, budget: Any = "1x") -> Any:
    return remat.optimize(model, budget, time_limit=0.3, progress=False)


def test_step_that_ends_in_a_scalar_is_planned_before_it_runs() -> None:
    model = optimized(layers(Mean))
    loss = model(X)
    session = session_of(model)
    assert len(session.graphs) == len(session.planned) == 1
    assert session.seen == {}, "nothing outside has to be watched"
    loss.backward()
    assert not session.is_under_way()


def test_step_whose_loss_is_outside_is_captured_then_watched_then_planned() -> None:
    model = layers()
    call = optimized(model)
    session = session_of(call)
    planned = []
    for _ in range(3):
        model.zero_grad()
        call(X).square().mean().backward()
        planned.append(len(session.planned))
    assert planned == [0, 1, 1]
    assert set(session.seen) == {session.planned[0].key}


def test_steps_with_and_without_gradients_have_plans_of_their_own() -> None:
    call = optimized(layers())
    session = session_of(call)
    for _ in range(4):
        for number in range(2):
            call(X).square().mean().backward()
            if number:
                call.zero_grad()
    assert {item.key[1] for item in session.planned} == {False, True}


def test_forward_that_is_never_gone_back_through_leaves_nothing_behind() -> None:
    call = optimized(layers())
    session = session_of(call)
    for _ in range(3):
        call(X)
    assert not session.is_under_way()
    assert session.planned == []
    for _ in range(2):
        call.zero_grad()
        call(X).square().mean().backward()
    assert len(session.planned) == 1


def test_budget_that_changes_while_nothing_runs_forgets_plans_and_keeps_what_was_seen() -> None:
    call = optimized(layers())
    session = session_of(call)
    for _ in range(2):
        call.zero_grad()
        call(X).square().mean().backward()
    seen = dict(session.seen)
    remat.set_budget(call, "0.95x")
    assert session.planned == []
    assert session.seen == seen


def test_kept_graph_is_told_once_and_planned_for() -> None:
    call = optimized(layers(Mean))
    session = session_of(call)
    heard = []
    for _ in range(3):
        call.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = call(X)
            loss.backward(retain_graph=True)
            loss.backward()
        heard.append(sum("keeps its graph" in str(item.message) for item in caught))
    assert heard == [1, 0, 0]
    assert session.kept_graph == 1


@pytest.mark.parametrize("is_logged", [True, False])
def test_step_that_raises_is_forgotten(is_logged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("torch._dynamo.convert_frame"), "disabled", not is_logged)
    call = optimized(layers())
    session = session_of(call)
    with pytest.raises(RuntimeError):
        call(torch.randn(8, 15))
    assert not session.is_under_way()
    for _ in range(2):
        call.zero_grad()
        call(X).square().mean().backward()
    assert len(session.planned) == 1


@pytest.mark.parametrize("kind", [nn.Sequential, Mean])
def test_forward_that_is_held_without_a_backward_is_no_part_of_later_steps(kind: type[nn.Sequential]) -> None:
    step = optimized(layers(kind))
    held = step(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(X).square().mean().backward()
    assert held.requires_grad
    assert len(session_of(step).calls) == len(remat.plan_of(step).fingerprint.graph_hashes) == 1
    assert not profiler_is_running()


def test_what_a_held_forward_saved_counts_as_resident_once_it_is_overtaken() -> None:
    step = optimized(layers())

    def steps() -> int:
        for _ in range(3):
            step.zero_grad()
            step(X).square().mean().backward()
        return int(remat.plan_of(step).predicted_peak)

    before = steps()
    held = step(X)
    after = steps()
    assert after - before >= X.nbytes, "at least the input of one layer was saved"
    held.square().mean().backward()


def test_forwards_that_are_held_again_and_again_do_not_plan_each_step_anew() -> None:
    step = optimized(layers())
    held, plans = [], []
    for _ in range(MOST_HELD + 6):
        held.append(step(X))
        step(X).square().mean().backward()
        plans.append(session_of(step).plan)
    assert len(set(map(id, plans[MOST_HELD + 2 :]))) == 1


def test_forward_that_is_gone_back_through_in_the_next_step_does_not_plan_each_step_anew() -> None:
    step = optimized(layers())
    plans = []
    for _ in range(MOST_HELD + 4):
        step.zero_grad()
        first, second = step(X), step(X + 1)
        second.square().mean().backward()
        (first + step(X + 2)).square().mean().backward()
        plans.append({id(item) for item in session_of(step).planned})
    assert plans[-1] == plans[-2] != set()
