"""Modes of torch.compile under a budget."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import remat
from remat.errors import RematError
from remat.inductor.modes import settings_of


def test_tuning_is_done_and_graphs_are_not() -> None:
    with pytest.warns(UserWarning, match="asks for CUDA graphs"):
        found = settings_of("max-autotune")
    assert found["max_autotune"] and found["triton.cudagraphs"] is False


def test_without_a_mode_nothing_else_is_asked(recwarn: pytest.WarningsRecorder) -> None:
    assert settings_of(None) == settings_of("default") == {"triton.cudagraphs": False}
    assert not recwarn.list


def test_an_unknown_mode_is_refused_with_those_that_there_are() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RematError, match="has no mode 'fastest'; it has default, "):
        remat.optimize(model, "1GiB", compiler="inductor", mode="fastest")


def test_eager_kernels_have_no_mode() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RematError, match='write compiler="inductor" with it'):
        remat.optimize(model, "1GiB", mode="max-autotune")
