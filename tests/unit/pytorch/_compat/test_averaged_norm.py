"""Batch norms that average over all batches run as an op of ours while a step is traced, and only those."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from remat.pytorch._compat.averaged_norm import AVERAGED_BATCH_NORM, averages_as_ops


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    result = layer(x)
    result.square().sum().backward()
    gradients = [item.grad for item in (x, *layer.parameters()) if item.grad is not None]
    return [result.detach(), *gradients, *layer.buffers()]


INPUTS = {
    "rows": torch.randn(6, 4),
    "half": torch.randn(6, 4).bfloat16(),
    "turned": torch.randn(6, 5, 4).transpose(1, 2),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("affine", [True, False])
def test_op_gives_the_bits_of_the_layer(kind: str, affine: bool) -> None:
    layer, x = nn.BatchNorm1d(4, momentum=None, affine=affine), INPUTS[kind]
    other = copy.deepcopy(layer)
    for number in range(1, 4):
        expected = run(layer, number * x)
        with averages_as_ops(), Calls() as calls:
            found = run(other, number * x)
        assert AVERAGED_BATCH_NORM in calls.ops
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        assert [item.stride() for item in found] == [item.stride() for item in expected]


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None).eval(),
        nn.BatchNorm1d(4, momentum=None, track_running_stats=False),
    ],
    ids=["with momentum", "in evaluation", "without statistics"],
)
def test_other_layers_run_as_they_are(layer: nn.Module) -> None:
    with averages_as_ops(), Calls() as calls:
        run(layer, INPUTS["rows"])
    assert AVERAGED_BATCH_NORM not in calls.ops


def test_batch_without_a_deviation_is_refused_as_by_the_layer() -> None:
    layer = nn.BatchNorm1d(4, momentum=None)
    with averages_as_ops(), pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 4))
    assert layer.num_batches_tracked == 1


def test_forward_is_there_again_afterwards_and_that_of_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, synchronized = _BatchNorm.forward, nn.SyncBatchNorm.forward
    with averages_as_ops():
        replaced = nn.BatchNorm2d.forward
        assert replaced is not before and nn.SyncBatchNorm.forward is synchronized
        with averages_as_ops():
            assert nn.BatchNorm2d.forward is replaced
        assert nn.BatchNorm2d.forward is replaced
    assert _BatchNorm.forward is before

    def theirs(layer: Any, input: torch.Tensor) -> torch.Tensor:
        return input

    monkeypatch.setattr(_BatchNorm, "forward", theirs)
    with averages_as_ops():
        assert _BatchNorm.forward is theirs
    assert _BatchNorm.forward is theirs
