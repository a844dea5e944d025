from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from tests.support.nets import WIDTH, Loss, Stack, batch, seeded, stack
from torch import nn

import remat


def test_a_model_is_like_itself() -> None:
    model = stack()
    found = remat.verify(model, model, batch())
    assert found.ok
    assert found.differences == ()


def test_optimized_model_passes_over_several_steps() -> None:
    model = seeded(lambda: Loss(nn.Sequential(Stack(), nn.BatchNorm1d(WIDTH))))
    assert remat.verify(model, remat.optimize(model, "0.7x", time_limit=1), batch(), steps=2).ok


def test_other_parameters_are_reported_by_name() -> None:
    model = stack(dropout=0.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.body.layers[0].weight[0, 0] += 1
    found = remat.verify(model, other, batch())
    assert not found.ok
    assert any("output 0" in sentence for sentence in found.differences)
    assert any("gradient of body.layers.0.weight" in sentence for sentence in found.differences)


def test_missing_gradient_is_reported() -> None:
    model = stack()
    other = copy.deepcopy(model)
    other.body.layers[5].requires_grad_(False)
    differences = remat.verify(model, other, batch()).differences
    assert any("body.layers.5.weight is there" in sentence and "absent" in sentence for sentence in differences)


class Restless(Stack):
    """Gives the same result and draws once more than it has to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        torch.rand(1)
        return found


def test_moved_generator_is_reported() -> None:
    model, other = seeded(lambda: Loss(Stack())), seeded(lambda: Loss(Restless()))
    (difference,) = remat.verify(model, other, batch()).differences
    assert difference.startswith("CPU generator")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        return self.norm(x)


def test_buffers_updated_twice_are_reported() -> None:
    model, other = Loss(nn.Sequential()), Loss(Twice())
    model.body.norm = other.body.norm
    model.body.forward = lambda x: model.body.norm(x)
    differences = remat.verify(model, other, batch()).differences
    assert {sentence.split(" differs")[0] for sentence in differences} == {
        "buffer body.norm.running_mean",
        "buffer body.norm.running_var",
        "buffer body.norm.num_batches_tracked",
    } - {"buffer body.norm.num_batches_tracked"}


def test_state_is_put_back() -> None:
    model = seeded(lambda: Loss(nn.Sequential(Stack(), nn.BatchNorm1d(WIDTH))))
    mean, state = model.body[1].running_mean.clone(), torch.get_rng_state()
    remat.verify(model, model, batch())
    assert torch.equal(model.body[1].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_is_not_compared_with_a_module() -> None:
    with pytest.raises(remat.RematError, match="two modules or two functions"):
        remat.verify(lambda x: x, stack(), batch())
