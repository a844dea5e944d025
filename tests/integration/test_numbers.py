"""Python numbers that change at every step: captured once as what they are, with eager's bits, within the budget."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import remat
from remat.pytorch.measure.measure_step import measure_once
from remat.pytorch.run.optimize import session_of

Uses = Callable[[torch.Tensor, Any], torch.Tensor]
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


class Using(nn.Module):
    """A few layers, and what they give with a number."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.last = nn.Linear(32, 32)
        self.uses, self.calls = uses, 0

    def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(self.uses(layer(x), number))
        return self.last(x).pow(2).mean()


class Counting(Using):
    def forward(self, x: torch.Tensor, number: Any) -> torch.Tensor:
        self.calls += 1
        return super().forward(x, self.calls + 2) * number


def trained_alike(make: Callable[[], nn.Module], numbers: list[Any]) -> Any:
    """Train plainly and under a budget, with another number in every step: the same bits."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    optimized = remat.optimize(model, "0.9x", time_limit=0.5, progress=False)
    for number in numbers:
        for item, call in ((plain, plain), (model, optimized)):
            item.zero_grad()
            torch.manual_seed(3)
            call(X, number).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), number
    model.zero_grad()
    return optimized


FLOATS: dict[str, Uses] = {
    "two factors": lambda x, number: (x.bfloat16() * number).float() + F.gelu(x) * (1 - number),
    "filled": lambda x, number: x.masked_fill(x > 1, number),
    "temperature": lambda x, number: F.softmax(x / max(number, 0.1), -1),
    "in place": lambda x, number: x.mul_(number).add_(number),
}
INTEGERS: dict[str, Uses] = {
    "warm-up": lambda x, number: x * min(1.0, number / 1000),
    "shift": lambda x, number: x.roll(number, 0),
    "asked about": lambda x, number: x * (2 if number < 1000 else 3),
}


@pytest.mark.parametrize("name", FLOATS)
def test_float_that_changes_is_captured_twice_at_most(name: str) -> None:
    numbers = [1 / (place + 1.37) for place in range(6)]
    optimized = trained_alike(lambda: Using(FLOATS[name]), numbers)
    # Once as a constant, once as what changes, and where torch asks whether it is 1 or 0, once more.
    assert len(session_of(optimized).graphs) <= 3
    plan = remat.plan_of(optimized)
    peak = measure_once(lambda: optimized(X, 0.123).backward()).peak_bytes
    assert peak <= plan.budget_bytes


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_that_changes_is_captured_twice(name: str) -> None:
    optimized = trained_alike(lambda: Using(INTEGERS[name]), [7 * place + 5 for place in range(6)])
    assert len(session_of(optimized).graphs) == 2


def test_count_of_steps_of_the_module_itself_is_captured_twice() -> None:
    optimized = trained_alike(
        lambda: Counting(lambda x, number: x * number), [math.exp(-place) for place in range(1, 7)]
    )
    assert len(session_of(optimized).graphs) == 2


def test_each_backward_has_the_number_of_its_own_forward() -> None:
    torch.manual_seed(0)
    plain = Using(FLOATS["two factors"])
    model = copy.deepcopy(plain)
    optimized = remat.optimize(model, "64MiB", progress=False)
    for call in (plain, optimized):
        for place in range(3):
            losses = [call(X, 0.3 + place + part) for part in range(2)]
            for loss in reversed(losses):
                loss.backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


@pytest.mark.parametrize(
    ("uses", "numbers"),
    [
        (lambda x, number: x[:number], [50 + place for place in range(10)]),
        (lambda x, number: x.abs().pow(number), [1 + place / 10 for place in range(10)]),
    ],
    ids=["a shape", "a power whose gradient is another op"],
)
@pytest.mark.slow
def test_number_that_has_to_be_a_constant_is_told_once_and_the_budget_holds(uses: Uses, numbers: list[Any]) -> None:
    def once(x: torch.Tensor, number: Any) -> torch.Tensor:
        return uses(x, number) if x.shape[0] == 64 else x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimized = trained_alike(lambda: Using(once), numbers)
    told = [str(warning.message) for warning in caught if "captured and planned" in str(warning.message)]
    assert len(told) == 1 and "args[1]" in told[0], [str(warning.message) for warning in caught]
    peak = measure_once(lambda: optimized(X, numbers[-1]).backward()).peak_bytes
    assert peak <= remat.plan_of(optimized).budget_bytes


def test_gradient_that_torch_cannot_trace_with_a_number_that_changes_is_traced_with_constants() -> None:
    """`RuntimeError: NYI log symbolic float`."""
    optimized = trained_alike(lambda: Using(lambda x, number: (number + 1) ** x), [0.3, 0.4, 0.5])
    assert session_of(optimized).left_out == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "graphs"),
    [((0.3, 0.4, 0.5), 2), pytest.param((3, 4, 5), 3, marks=pytest.mark.long)],
    ids=["floats", "integers"],
)
def test_compiled_step_is_planned_whatever_the_number_is(numbers: tuple[Any, ...], graphs: int) -> None:
    torch.manual_seed(0)
    model = Using(lambda x, number: x * number)
    plain = copy.deepcopy(model)
    optimized = remat.optimize(model, "64MiB", compiler="inductor", progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "A graph")
        for number in numbers:
            for item, call in ((plain, plain), (model, optimized)):
                item.zero_grad()
                call(X, number).backward()
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
    assert len(session_of(optimized).graphs) == graphs and session_of(optimized).left_out == 0
