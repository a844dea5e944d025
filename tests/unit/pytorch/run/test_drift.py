"""Steps that are watched as they go on: what they take, what others leave, and what that costs."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import remat
from remat.pytorch.run.optimize import session_of
from remat.pytorch.run.watching.drift import DRIFT, FIRST, LATEST, MOST_AGAIN, DriftWatch, Gate, TimesTaken

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


class Deep(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))


def record_of(usual: float, latest: float) -> TimesTaken:
    record = TimesTaken()
    for amount in (*[usual] * FIRST, *[latest] * LATEST):
        record.add(amount)
    return record


def test_looking_that_took_more_than_its_share_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    gate = Gate(share=0.01)
    due = []
    for _ in range(6):
        due.append(gate.is_due())
        gate.spent_ns += 25 if due[-1] else 0
        now[0] += 1000
    assert due == [True, False, False, True, False, True], "25 of every 1,000 or more, one percent in the end"


@pytest.mark.parametrize(("latest", "expected"), [(100, 1.0), (110, 1.0), (130, 1.3), (70, 0.7)])
def test_only_steps_that_changed_by_much_have_drifted(latest: float, expected: float) -> None:
    watch = DriftWatch(records={"plan": record_of(100, latest)})
    assert watch.drifted("plan") == pytest.approx(expected)
    assert watch.drifted("another") == 1.0


def test_ops_are_measured_again_a_few_times_and_then_taken_as_they_are() -> None:
    watch = DriftWatch(records={"plan": record_of(100, 100 * DRIFT * 1.1)})
    assert [watch.drifted("plan") > 1 for _ in range(MOST_AGAIN + 2)] == [True] * MOST_AGAIN + [False] * 2


def test_memory_that_others_take_is_given_and_spent_again_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    room: list[Any] = [None]
    monkeypatch.setattr("remat.pytorch.run.watching.drift.room_bytes", lambda device: room[0])
    monkeypatch.setattr("remat.pytorch.run.watching.drift.MOST_SHARE", 1.0)
    model = deep()
    step = remat.optimize(model, "1x", progress=False, time_limit=0.3)
    session_of(step).drift.gate.share = 1.0
    expected = None
    for words in (None, "Others leave .* of the device, less than the budget", None, "Others have given back"):
        plan = remat.plan_of(step) if expected is not None else None
        if words is not None:
            assert plan is not None
            room[0] = int(0.8 * plan.predicted_peak) if "leave" in words else 10**12
        model.zero_grad()
        if words is None:
            loss = step(X)
        else:
            with pytest.warns(UserWarning, match=words):
                loss = step(X)
        loss.backward()
        expected = loss.detach() if expected is None else expected
        assert torch.equal(loss, expected)
        after = remat.plan_of(step)
        if words is not None and "leave" in words:
            assert after.predicted_peak <= room[0] < plan.predicted_peak
    assert session_of(step).drift.left_bytes is None
    assert remat.plan_of(step).overhead == 0


def test_steps_that_have_become_slower_are_measured_and_planned_again() -> None:
    model = deep()
    step = remat.optimize(model, "0.7x", progress=False, time_limit=0.3)
    session = session_of(step)
    step(X).backward()
    model.zero_grad()
    (planned,) = session.planned
    session.drift.records[planned.key] = record_of(100, 200)
    with pytest.warns(UserWarning, match="Steps take 2.00 times as long as when they were planned"):
        step(X).backward()
    assert session.planned[0] is not planned and session.planned[0].key == planned.key
    assert session.drift.records == {}
