"""State that an optimizer has not made yet, foreseen to the byte by a step on a small parameter."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from remat.pytorch.reach import dense_parts, innermost, tensors_within
from remat.pytorch.resident.optimizer_state import pending_state_bytes

CPU = torch.device("cpu")


def parameters() -> list[nn.Parameter]:
    shapes = [(640, 96), (96, 640), (512, 512), (9000,), (7,), (600, 3, 3, 3), ()]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def made_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What the state takes once it is there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tensors = tensors_within([dict(state) for state in optimizer.state.values()])
    return sum(part.untyped_storage().nbytes() for tensor in tensors for part in dense_parts(tensor))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_state_is_foreseen(kind: Any, options: dict[str, Any]) -> None:
    optimizer = kind(parameters(), **options)
    pending = pending_state_bytes(optimizer, CPU)
    already = sum(tensor.untyped_storage().nbytes() for tensor in tensors_within([*optimizer.state.values()]))
    assert pending + already == made_bytes(optimizer)
    assert pending_state_bytes(optimizer, CPU) == 0


def test_options_of_each_group_count() -> None:
    first, second = parameters()[:2]
    optimizer = torch.optim.SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=0.1)
    assert pending_state_bytes(optimizer, CPU) == first.numel() * 4


def test_trying_leaves_the_optimizer_as_it_was() -> None:
    optimizer = torch.optim.AdamW(parameters())
    before = [parameter.clone() for group in optimizer.param_groups for parameter in group["params"]]
    told: list[object] = []
    optimizer.register_step_post_hook(lambda *_: told.append(1))
    pending_state_bytes(optimizer, CPU)
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(map(torch.equal, before, after)) and not optimizer.state and not told


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer that hands everything to another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def test_state_that_cannot_be_tried_is_estimated_with_a_warning() -> None:
    optimizer = NeedsClosure([nn.Parameter(torch.zeros(10))])
    with pytest.warns(UserWarning, match="taken to be 2 times as large"):
        assert pending_state_bytes(optimizer, CPU) == 80


def test_wrappers_are_looked_through() -> None:
    inner = torch.optim.SGD(parameters(), lr=0.1)
    assert innermost(Wrapper(Wrapper(inner))) is inner
    assert innermost(inner) is inner
