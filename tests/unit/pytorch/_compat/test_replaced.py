"""Functions and settings of torch's come back as they were, and a planned step leaves nothing of them behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

import remat
from remat.pytorch._compat.replaced import replaced, settings_changed


def twice(function: Any) -> Any:
    def doubled(number: int) -> int:
        return 2 * int(function(number))

    return doubled


def test_function_comes_back_and_is_replaced_once() -> None:
    def same(number: int) -> int:
        return number

    place = SimpleNamespace(call=same)
    with pytest.raises(KeyError), replaced(place, "call", twice), replaced(place, "call", twice):
        assert place.call(3) == 6
        raise KeyError
    assert place.call is same


def test_settings_come_back() -> None:
    config = SimpleNamespace(first=1, second=2)
    with pytest.raises(KeyError), settings_changed(config, first=3):
        assert (config.first, config.second) == (3, 2)
        raise KeyError
    assert (config.first, config.second) == (1, 2)


def test_planned_step_makes_no_patch_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each, torch 2.13 keeps a variable of the context for good: some hundred bytes in every step."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    step = remat.optimize(lambda x: model(x).pow(2).mean(), "64MiB", progress=False)
    for _ in range(3):
        step(x).backward()

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("a patch in a step that is captured and planned")

    monkeypatch.setattr(type(dynamo_config), "patch", refuse)
    step(x).backward()
