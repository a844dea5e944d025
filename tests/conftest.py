"""What every test gets: a fixed Hypothesis profile, and visible skips where there is no GPU."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import HealthCheck, settings

# Deadlines fail on a slow shared machine; derandomizing makes two runs of the same code agree.
settings.register_profile(
    "house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@cache
def has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
