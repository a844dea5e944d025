"""Which models are taken to stand beside the step, and when torch's table of hooks is left alone."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn.modules import module as tables

from remat.pytorch.resident.beside import ModelsBeside, nobody_looks

X = torch.randn(2, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_models_called_without_gradients_are_noted_and_their_layers_are_not() -> None:
    teacher, frozen, trained = model(), model().requires_grad_(False), model()
    beside = ModelsBeside()
    beside.look()
    with torch.no_grad():
        teacher(X)
    frozen(X)
    trained(X)
    with nobody_looks(), torch.no_grad():
        trained(X)
    beside.look_away()
    assert beside.models() == [teacher, frozen]


def test_model_that_raises_leaves_the_next_one_outermost() -> None:
    beside, second = ModelsBeside(), model()
    beside.look()
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            model()(torch.randn(2, 5))
        second(X)
    beside.look_away()
    assert beside.models()[-1] is second


def test_no_model_is_kept_alive() -> None:
    beside = ModelsBeside()
    beside.look()
    with torch.no_grad():
        model()(X)
    gc.collect()
    assert beside.models() == []


def test_hooks_go_with_the_next_call_when_nobody_looks_and_not_by_garbage_collection() -> None:
    ModelsBeside().look()
    gc.collect()
    assert tables._global_forward_hooks, "taken away at any moment, they could be missed in the middle of a trace"
    model()(X)
    assert not tables._global_forward_hooks and not tables._global_forward_pre_hooks
