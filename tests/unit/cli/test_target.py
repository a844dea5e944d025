"""Targets: zoo names and factories become examples; everything else is refused with what to write."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from remat.cli.target import choose_device, load_target
from remat.errors import RematError, UnknownName

SOURCE = """
import torch
from torch import nn

def pair():
    return nn.Linear(4, 4), (torch.ones(2, 4),)

def bare():
    return nn.Linear(4, 4), torch.ones(2, 4)

def triple():
    return nn.Linear(4, 4), (), {"input": torch.ones(2, 4)}

def example():
    from remat.zoo import build
    return build("mlp", width=8)

def wrong():
    return 3

def wrong_keywords():
    return nn.Linear(4, 4), (), 3

def broken():
    raise ValueError("no data here")

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that lies in the working directory only."""
    (tmp_path / "user_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "user_model", raising=False)
    return "user_model"


@pytest.mark.parametrize("name", ["pair", "bare", "triple"])
def test_factory_gives_model_and_batch(module: str, name: str) -> None:
    example = load_target(f"{module}:{name}")
    assert example.model(*example.args, **example.kwargs).shape == (2, 4)


def test_factory_may_return_an_example(module: str) -> None:
    assert load_target(f"{module}:example").args[0].shape[1] == 8


def test_factory_is_seeded(module: str) -> None:
    first, second = (load_target(f"{module}:pair", seed=5).model.weight for _ in range(2))
    assert torch.equal(first, second)


def test_device_moves_model_and_batch(module: str) -> None:
    example = load_target(f"{module}:triple", device="meta")
    assert example.kwargs["input"].device.type == "meta"
    assert next(example.model.parameters()).device.type == "meta"


def test_zoo_name_gives_the_zoo_model() -> None:
    assert type(load_target("mlp", device="cpu").model).__name__ == "MLP"


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("alexnet", UnknownName, "neither a zoo model .* nor of the form package.module:factory"),
        ("user_model:", UnknownName, "neither a zoo model"),
        ("no_such_module:pair", UnknownName, "Cannot import 'no_such_module'"),
        ("user_model:absent", UnknownName, "'user_model' has no function 'absent'"),
        ("user_model:number", UnknownName, "'user_model' has no function 'number'"),
        ("user_model:wrong", RematError, "returned int; return \\(model, args\\)"),
        ("user_model:wrong_keywords", RematError, "int as keyword arguments"),
        ("user_model:broken", RematError, "raised ValueError: no data here"),
    ],
)
def test_bad_target_is_refused_with_what_to_write(
    module: str, target: str, error: type[RematError], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_target(target)


def test_unusable_device_is_refused() -> None:
    with pytest.raises(UnknownName, match="Cannot use the device 'abacus'"):
        choose_device("abacus")
