"""Which models are taken to stand beside the step."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn

from remat.pytorch.resident.beside import ModelsBeside


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


TEACHER, FROZEN, TRAINED, UNNAMED = model().eval(), model().requires_grad_(False), model(), model().eval()
STATE: Any = SimpleNamespace(average=model().eval(), copies=None)


def test_global_models_that_the_calling_code_names_and_does_not_train_are_noted() -> None:
    beside = ModelsBeside()

    def loop() -> None:
        assert TRAINED.training and FROZEN is not None and STATE is not None
        beside.look()

    loop()
    assert not TEACHER.training
    assert {id(item) for item in beside.models()} == {id(item) for item in (TEACHER, FROZEN, STATE.average)}


def test_no_model_is_kept_alive() -> None:
    beside, local = ModelsBeside(), model().eval()
    STATE.copies = model().eval()
    beside.look()
    assert local in beside.models()
    count = len(beside.models())
    STATE.copies = None
    del local
    gc.collect()
    assert len(beside.models()) == count - 2
