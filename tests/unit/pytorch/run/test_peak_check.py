"""A step that needs more than its budget is told, and the next ones are planned with less."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import remat
from remat.pytorch.run.watching.drift import Gate
from remat.pytorch.run.watching.peak_check import CHECKED_STEPS, PeakCheck

EXTRA_BYTES = 5_000


class MadeUpPeak:
    """Of a device whose steps need a little more than they were predicted to."""

    peaks: list[int]

    def __init__(self, device: torch.device) -> None:
        self.is_open = False

    def open(self, *, may_have_been: int) -> None:
        self.is_open = True

    def look(self) -> int:
        assert self.is_open
        return self.peaks.pop(0)

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the device will say, one for each step that is measured."""
    monkeypatch.setattr("remat.pytorch.run.watching.peak_check.CudaPeak", MadeUpPeak)
    monkeypatch.setattr("remat.pytorch.run.watching.peak_check.tells_peak", lambda device: True)
    MadeUpPeak.peaks = []
    return MadeUpPeak.peaks


@pytest.mark.filterwarnings("ignore:The last step needed")
def test_a_few_steps_after_planning_are_measured(peaks: list[int]) -> None:
    check, device = PeakCheck(gate=Gate(share=0.0)), torch.device("cpu")
    check.after_planning()
    peaks += [150] * 10
    found = []
    for _ in range(6):
        check.begin_step(device, 100)
        check.goes_back()
        check.engine_returned()
        found.append(check.is_exceeded(100))
    assert found == [True] * CHECKED_STEPS + [False] * (6 - CHECKED_STEPS)
    assert check.beyond_bytes == 50 * CHECKED_STEPS


def test_step_above_its_budget_is_planned_again_with_less(peaks: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(512, 64)
    step = remat.optimize(lambda x: model(x).pow(2).mean(), "0.8x", progress=False, time_limit=1)

    def train() -> None:
        model.zero_grad()
        step(x).backward()

    train()
    first = remat.plan_of(step)
    peaks += [first.budget_bytes + EXTRA_BYTES] + [first.budget_bytes - 1] * 20
    train()
    with pytest.warns(UserWarning, match="more than its budget; the next ones are planned with"):
        train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            train()
    again = remat.plan_of(step)
    assert dict(again.breakdown_bytes)["beyond what was foreseen"] == EXTRA_BYTES
    assert again.budget_bytes == first.budget_bytes and again.predicted_peak <= first.budget_bytes
    assert again.plain_peak_bytes == first.plain_peak_bytes


def test_step_that_breaks_off_leaves_nothing_open(peaks: list[int]) -> None:
    check, device = PeakCheck(), torch.device("cpu")
    check.after_planning()
    peaks += [7] * CHECKED_STEPS
    for _ in range(CHECKED_STEPS):
        check.begin_step(device, 1)
        check.goes_back()
        check.engine_returned()
    assert check.stop() == 7
    assert peaks == [] and check.stop() == 0 and check.beyond_bytes == 0


def test_peak_is_taken_when_gradients_were_accumulated(peaks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient in another layout than its parameter's is copied then, beside all the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x, had_gradients = torch.randn(16, 8), []
    monkeypatch.setattr(
        MadeUpPeak, "look", lambda _: had_gradients.append(all(p.grad is not None for p in model.parameters())) or 0
    )
    step = remat.optimize(lambda x: model(x).pow(2).mean(), "1x", progress=False, time_limit=1)
    for _ in range(CHECKED_STEPS + 2):
        model.zero_grad()
        step(x).backward()
    assert len(had_gradients) >= CHECKED_STEPS and all(had_gradients)


@pytest.mark.slow
def test_compiled_step_above_its_budget_is_planned_again_with_less(peaks: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(512, 64)
    step = remat.optimize(lambda x: model(x).pow(2).mean(), "0.8x", compiler="inductor", progress=False)

    def train() -> None:
        model.zero_grad()
        step(x).backward()

    train()
    first = remat.plan_of(step)
    peaks += [first.budget_bytes + EXTRA_BYTES] + [first.budget_bytes - 1] * 20
    train()
    with pytest.warns(UserWarning, match="more than its budget; the next ones are planned with"):
        train()
    again = remat.plan_of(step)
    assert again.budget_bytes == first.budget_bytes
    assert again.predicted_peak <= first.budget_bytes - EXTRA_BYTES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            train()
    assert remat.plan_of(step) is again


def test_peaks_of_other_models_between_two_steps_do_not_count(peaks: list[int]) -> None:
    check, device = PeakCheck(), torch.device("cpu")
    check.after_planning()
    peaks += [90, 500]
    check.begin_step(device, 100)
    check.engine_began([])
    check.goes_back()
    check.engine_returned()
    check.engine_began([])
    check.engine_returned()
    assert not check.is_exceeded(100)
    assert peaks == [500]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:What your code needs between")
def test_compiled_steps_are_known_to_need_what_runs_between_their_graphs(peaks: list[int]) -> None:
    """A loss outside, as a recurrent layer that is not compiled, is foreseen by nobody."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(512, 64)
    step = remat.optimize(model, "2x", compiler="inductor", progress=False, time_limit=1)

    def train() -> None:
        model.zero_grad()
        step(x).square().mean().backward()

    train()
    train()
    first = remat.plan_of(step)
    peaks += [first.budget_bytes - 1] * 20
    for _ in range(3):
        train()
    assert first.predicted_peak < remat.plan_of(step).predicted_peak == first.budget_bytes - 1
