"""What every test gets: a fixed Hypothesis profile, its own cache folder, visible skips without a GPU, a small heap."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Deadlines fail on a slow shared machine; derandomizing makes two runs of the same code agree.
settings.register_profile(
    "house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests that take minutes")
    parser.addoption("--stack-budget", default="0.7x", help="the budget of tests/stacks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with --long"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Measured costs of a test run stay out of the user's cache, and the user's out of the tests."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def frozen_imports() -> None:
    """What was imported is not walked again by each garbage collection, nor by each look for living optimizers.

    Half a million objects; without this, small tests spend half of their time on them.
    """
    if "torch" in sys.modules:
        import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def forgotten_graphs() -> Iterator[None]:
    """Dynamo would keep every model that was compiled until the process ends."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def kept_switches() -> Iterator[None]:
    """A test that leaves one of torch's switches moved changes the kernels of those after it.

    Torch moves one by itself: where the machine has no kernel for low precision, the first product ends oneDNN's use.
    """
    before, onednn = switches(), onednn_is_used()
    yield
    if onednn and not onednn_is_used():
        sys.modules["torch"].backends.mkldnn.enabled = True
    assert before in ((), switches())


def switches() -> tuple[object, ...]:
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )


def onednn_is_used() -> bool:
    return "torch" not in sys.modules or sys.modules["torch"].backends.mkldnn.enabled


@cache
def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
