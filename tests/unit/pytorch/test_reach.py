from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from remat.pytorch.reach import reachable_from, reachable_optimizers

CPU = torch.device("cpu")
PARAMETER_BYTES = 4 * (8 * 8 + 8)
model = nn.Linear(8, 8)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"model": [model]}

    def step(self) -> None: ...


def _in_closure() -> Callable[[], object]:
    mine = model
    return lambda: mine


def _in_defaults() -> Callable[..., object]:
    def step(x: int = 0, model: nn.Module = model) -> nn.Module:
        return model

    return step


def _in_globals() -> Callable[[], object]:
    return lambda: model


STEPS = {
    "module": lambda: model,
    "closure": _in_closure,
    "defaults": _in_defaults,
    "globals": _in_globals,
    "bound method of a module": lambda: model.forward,
    "bound method": lambda: Trainer(model).step,
    "partial": lambda: functools.partial(print, model),
    "object": lambda: Trainer(model),
    "wrapped": lambda: functools.wraps(_in_closure())(lambda: None),
}


@pytest.mark.parametrize("kind", STEPS)
def test_parameters_are_found_in(kind: str) -> None:
    found = reachable_from(STEPS[kind]()).bytes_by_class(CPU)
    assert found["parameters"] == PARAMETER_BYTES
    assert sum(found.values()) == PARAMETER_BYTES


def test_shared_storage_counts_once() -> None:
    base = torch.zeros(100)
    found = reachable_from(None, [base, base[:10], {"view": base.view(10, 10)}])
    assert found.total_bytes(CPU) == 400


def test_gradients_and_optimizer_state_have_their_own_class() -> None:
    mine = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    mine(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    found = reachable_from(mine, [optimizer]).bytes_by_class(CPU)
    assert found["parameters"] == found["gradients"] == found["optimizer state"] == PARAMETER_BYTES


def test_buffers_are_not_parameters() -> None:
    found = reachable_from(nn.BatchNorm1d(8)).bytes_by_class(CPU)
    assert found == {"parameters": 64, "buffers": 72, "gradients": 0, "optimizer state": 0, "inputs": 0}


def test_optimizers_of_a_step_are_found() -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert reachable_optimizers(lambda: optimizer) == [optimizer]
    assert reachable_optimizers(lambda: None) == []


def test_cycles_end() -> None:
    one, two = Trainer(model), Trainer(model)
    one.other, two.other = two, one
    assert reachable_from(one).total_bytes(CPU) == PARAMETER_BYTES


def test_libraries_are_not_walked_into() -> None:
    holder = SimpleNamespace(tensor=torch.zeros(1000))
    assert reachable_from(holder).total_bytes(CPU) == 0


def test_tensor_that_wraps_another_counts_by_what_is_inside() -> None:
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(64, 8), init_device_mesh("cpu", (1,)), [Shard(0)])
        module = nn.Module()
        module.weight = nn.Parameter(sharded)
        assert reachable_from(module).bytes_by_class(torch.device("cpu"))["parameters"] == 64 * 8 * 4
    finally:
        destroy_process_group()
