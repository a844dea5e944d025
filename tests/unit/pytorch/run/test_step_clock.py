"""What steps take on the device is known from the steps themselves, and the plan says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from remat.pytorch.run.watching import step_clock
from remat.pytorch.run.watching.step_clock import LATEST, TIMED_STEPS, StepClock

CPU = torch.device("cpu")


class MadeUpTimer:
    """Of a device that takes what it is told to, and is asked once for each step."""

    takes: list[float | None]
    """What each step takes; None for one that the device has not come to yet."""

    def __init__(self, device: torch.device) -> None:
        self.is_stopped = False
        self._number = len(MadeUpTimer.made)
        MadeUpTimer.made.append(self)

    made: list[MadeUpTimer]

    def stop(self) -> None:
        self.is_stopped = True

    def time_ns(self) -> float | None:
        return MadeUpTimer.takes[self._number]


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    monkeypatch.setattr(step_clock, "StepTimer", MadeUpTimer)
    monkeypatch.setattr(step_clock, "tells_time", lambda device: True)
    MadeUpTimer.takes, MadeUpTimer.made = [], []
    return MadeUpTimer.takes


def run(clock: StepClock, *, goes_back: bool = True) -> None:
    clock.begin_step(CPU)
    if clock.is_watching:
        clock.engine_began([])
        if goes_back:
            clock.goes_back()
        clock.engine_returned()


def test_the_latest_of_the_first_steps_count(takes: list[float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "LATER_SHARE", -1.0)
    clock = StepClock()
    clock.after_planning()
    takes += [900.0] * (TIMED_STEPS - LATEST) + [100.0] * LATEST + [5.0] * 10
    for _ in range(TIMED_STEPS + 5):
        run(clock)
    assert clock.usual_ns() == 100.0
    assert len(MadeUpTimer.made) == TIMED_STEPS, "later steps are left alone where looking would cost too much"


def test_what_steps_take_is_followed_where_looking_costs_nothing(
    takes: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_clock, "LATER_SHARE", 1e9)
    clock = StepClock()
    clock.after_planning()
    takes += [900.0] * TIMED_STEPS + [100.0] * LATEST
    for _ in range(TIMED_STEPS + LATEST):
        run(clock)
    clock.begin_step(CPU)
    assert clock.usual_ns() == 100.0, "the first steps ran beside something else"
    assert len(clock._waiting) == 0, "what was read is let go"


def test_nothing_is_waited_for(takes: list[float | None]) -> None:
    clock = StepClock()
    clock.after_planning()
    takes += [100.0, None, 300.0]
    for _ in range(3):
        run(clock)
    clock.begin_step(CPU)
    assert clock.usual_ns() == 100.0, "what comes after a step that the device is at is not known either"
    takes[1] = 200.0
    assert clock.usual_ns() == 200.0
    clock.after_planning()
    assert clock.usual_ns() == 0.0, "another plan takes another time"


def test_steps_that_do_not_go_back_are_left_out(takes: list[float | None]) -> None:
    clock = StepClock()
    clock.after_planning()
    takes += [7.0, 100.0, 7.0]
    for goes_back in (False, True, False):
        run(clock, goes_back=goes_back)
    clock.begin_step(CPU)
    assert clock.usual_ns() == 100.0


def test_before_a_plan_is_made_no_step_is_timed(takes: list[float | None]) -> None:
    run(StepClock())
    assert not MadeUpTimer.made


def test_the_plan_of_a_compiled_step_says_what_its_steps_take(
    takes: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import remat

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    step: Any = remat.optimize(
        lambda x: model(x).square().mean(), "1x", compiler="inductor", progress=False, time_limit=0.3
    )
    takes += [5e6] * 10
    x = torch.randn(4, 8)
    step(x).backward()
    before = remat.plan_of(step)
    for _ in range(3):
        model.zero_grad()
        step(x).backward()
    after = remat.plan_of(step)
    assert before.compiled is not None and after.compiled is not None
    assert before.predicted_time == before.compiled.time_ns != 5e6
    assert after.predicted_time == 5e6 and after.compiled == replace(before.compiled, seen_ns=5e6)
