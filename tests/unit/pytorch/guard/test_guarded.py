"""A guarded step gives the bits of an undisturbed one, whatever runs out of memory in it."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.memory_faults import OutOfMemoryAbove, OutOfMemoryAt
from torch import nn
from torch.nn import functional as F

import remat
from remat.pytorch.guard.guarded import guard_of
from remat.pytorch.guard.memory_errors import is_out_of_memory

AGAIN = "rolled back and run again as it is"


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.last(F.dropout(F.relu(self.norm(self.first(x))))), y)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def batch(size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    return found


def gradient_bytes(model: nn.Module) -> int:
    return sum(item.grad.nbytes for item in model.parameters() if item.grad is not None)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def whole_step(model: nn.Module) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, y)
        loss.backward()
        return loss.detach()

    return step


def guarded_model(model: nn.Module) -> Callable[..., torch.Tensor]:
    return whole_step(remat.guarded(model))


def guarded_function(model: nn.Module) -> Callable[..., torch.Tensor]:
    return remat.guarded(whole_step(model))


def train(
    model: nn.Module,
    step: Callable[..., Any],
    steps: int,
    accumulate: int,
    faults: Callable[[int], OutOfMemoryAt | None],
) -> list[OutOfMemoryAt]:
    """SGD with momentum; the modes that were active."""
    torch.manual_seed(1)
    random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    modes = []
    for number in range(steps):
        mode, data = faults(number), batch(seed=number)
        if mode is None:
            step(*data)
        else:
            modes.append(mode)
            with mode:
                step(*data)
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return modes


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [guarded_function, guarded_model])
def test_faults_in_every_second_step_change_no_bit(make: Any, accumulate: int, count: int) -> None:
    torch.manual_seed(0)
    plain = Net()
    disturbed = copy.deepcopy(plain)
    train(plain, whole_step(plain), 2 * count, accumulate, lambda number: None)
    choose = random.Random(accumulate)
    broken = set(choose.sample(range(2 * count), count))
    data, step = batch(), whole_step(copy.deepcopy(plain))
    with OutOfMemoryAt() as counted:
        step(*data)

    def faults(number: int) -> OutOfMemoryAt | None:
        return OutOfMemoryAt(choose.randint(1, counted.seen)) if number in broken else None

    with pytest.warns(UserWarning, match=AGAIN) as told:
        modes = train(disturbed, make(disturbed), 2 * count, accumulate, faults)
    # Gradients are all that a step leaves; those of a failed run are not left twice.
    gc.collect()
    assert {mode.live_bytes() for mode in modes} <= {0, gradient_bytes(disturbed)}
    assert sum(mode.raised for mode in modes) == count
    assert len(told) == 1
    assert_same(state_of(disturbed), state_of(plain))


def test_step_that_drops_old_gradients_has_their_memory() -> None:
    model, data = mlp(), batch()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()

    peaks = []
    for run in (step, remat.guarded(step)):
        with OutOfMemoryAbove(10**9) as device:
            run(*data)
            run(*data)
        peaks.append(device.peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("place", range(6, 26, 2))
def test_failed_step_leaves_nothing_in_memory(place: int) -> None:
    model, starts = Net(), []
    run = whole_step(model)
    mode = OutOfMemoryAt(place)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        starts.append(mode.live_bytes())
        run(x, y)

    data = batch()
    with pytest.warns(UserWarning, match=AGAIN), mode:
        remat.guarded(step)(*data)
    assert mode.raised == 1
    assert len(starts) == 2 and starts[0] == starts[1]


def test_faults_of_the_cpu_allocator_count_too() -> None:
    model = Net()
    words = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    data = batch()
    with pytest.warns(UserWarning, match=AGAIN), OutOfMemoryAt(9, message=words):
        remat.guarded(whole_step(model))(*data)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_other_errors_pass_untouched() -> None:
    def step(x: torch.Tensor) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        remat.guarded(step)(torch.ones(2))


@pytest.mark.parametrize("places", [(14,), (17,), (20,), (22,), (17, 45), (20, 48)])
def test_gradients_of_earlier_steps_survive_two_faults_in_backward(places: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Net()
    disturbed = copy.deepcopy(plain)
    for model, step in ((plain, whole_step(plain)), (disturbed, remat.guarded(whole_step(disturbed)))):
        torch.manual_seed(3)
        step(*batch(seed=0))
        if model is plain:
            step(*batch(seed=1))
            continue
        data = batch(seed=1)
        with warnings.catch_warnings(), OutOfMemoryAt(*places) as mode:
            warnings.simplefilter("ignore")
            try:
                step(*data)
            except torch.OutOfMemoryError as error:
                # After two faults it would be split, which batch statistics do not allow.
                assert "batch normalization" in error.__notes__[0]
                return
            assert mode.raised >= 1
    assert_same(state_of(disturbed), state_of(plain))


def test_optimizer_that_has_begun_is_not_run_again() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        torch.ones(3).add(1)
        raise torch.OutOfMemoryError("late")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        remat.guarded(step)(*batch())
    assert "an optimizer had begun" in raised.value.__notes__[0]


def test_gradients_changed_in_place_are_not_guessed() -> None:
    model = Net()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad(set_to_none=False)
        model(x, y).backward()
        raise torch.OutOfMemoryError("late")

    whole_step(model)(*batch())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        remat.guarded(step)(*batch())
    assert "set_to_none=True" in raised.value.__notes__[0]


def loss_step(model: nn.Module, reduction: str) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batch_that_never_fits_runs_in_parts(reduction: str, size: int) -> None:
    plain, split = mlp(), mlp()
    data = batch(64 * size)
    expected = loss_step(plain, reduction)(*data)
    with OutOfMemoryAbove(10**9) as whole:
        loss_step(mlp(), reduction)(*data)
    guarded = remat.guarded(loss_step(split, reduction))
    with warnings.catch_warnings(record=True) as told, OutOfMemoryAbove(int(0.7 * whole.peak)) as device:
        warnings.simplefilter("always")
        found = guarded(*data)
    assert f"in 2 parts of its batch, as the loss is a {reduction}" in str(told[-1].message)
    assert device.raised == 2
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    split.zero_grad()
    with OutOfMemoryAbove(int(0.7 * whole.peak)) as device:
        guarded(*data)
    assert device.raised == 0, "a size that was split once is split at once"


def test_module_runs_in_parts() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits}

    plain, split = Loss(), Loss()
    x, y = batch(512)
    given, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    with OutOfMemoryAbove(10**9) as whole:
        expected = plain(given, y)
        (3 * expected["loss"]).backward()
    model = remat.guarded(split)
    with warnings.catch_warnings(), OutOfMemoryAbove(int(0.75 * whole.peak)):
        warnings.simplefilter("ignore")
        found = model(ours, y)
        (3 * found["loss"]).backward()
    assert any("parts" in words for words in guard_of(model).changes)
    torch.testing.assert_close(found["loss"], expected["loss"])
    torch.testing.assert_close(found["logits"], expected["logits"])
    torch.testing.assert_close(ours.grad, given.grad)
    for left, right in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_loss_that_is_no_mean_is_not_split() -> None:
    model = mlp()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).square().backward()

    data = batch(512)
    device, refused = OutOfMemoryAbove(60_000), pytest.raises(torch.OutOfMemoryError)
    with pytest.warns(UserWarning, match=AGAIN), refused as raised, device:
        remat.guarded(step)(*data)
    assert "neither the mean nor the sum" in raised.value.__notes__[0]
    assert all(item.grad is None for item in model.parameters())


def test_step_with_an_optimizer_is_not_split() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = state_of(model)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    data = batch(512)
    device, refused = OutOfMemoryAbove(60_000), pytest.raises(torch.OutOfMemoryError)
    with pytest.warns(UserWarning, match=AGAIN), refused as raised, device:
        remat.guarded(step)(*data)
    assert "it calls an optimizer" in raised.value.__notes__[0]
    assert_same(state_of(model), before)


def test_tighter_plans_come_before_parts() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))

    plain, model = build(), build()
    data = batch(256)
    expected = loss_step(plain, "mean")(*data)
    step = remat.guarded(loss_step(remat.optimize(model, "1x", time_limit=1, progress=False), "mean"))
    for _ in range(3):
        step(*data)
        model.zero_grad()
    with OutOfMemoryAbove(10**9) as whole:
        step(*data)
    model.zero_grad()
    with warnings.catch_warnings(), OutOfMemoryAbove(int(0.8 * whole.peak)):
        warnings.simplefilter("ignore")
        assert torch.equal(step(*data), expected)
    assert any("budget" in words for words in step.changes)
    assert not any("parts" in words for words in step.changes)
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_scaler_is_as_before() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    calls = []

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        scaler.scale(model(x, y)).backward()
        scaler.unscale_(optimizer)
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("after unscaling")

    calls.append(1)
    step(*batch())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    calls.clear()
    with pytest.warns(UserWarning, match=AGAIN):
        remat.guarded(step)(*batch())
    assert len(calls) == 2


def test_plan_is_found_behind_the_guard() -> None:
    model = remat.guarded(remat.optimize(Net(), "1x", time_limit=0.5, progress=False))
    model(*batch()).backward()
    assert remat.plan_of(model).predicted_peak > 0


def test_bad_input_gets_a_sentence() -> None:
    with pytest.raises(remat.RematError, match="a function or a module, not a int"):
        remat.guarded(3)
    with pytest.raises(remat.RematError, match="There is no reduction 'max'"):
        remat.guarded(mlp(), reduction="max")
    with pytest.raises(remat.RematError, match="not guarded"):
        guard_of(mlp())
