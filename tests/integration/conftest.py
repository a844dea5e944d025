"""What tests of compiled steps share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of scalars compile faster, and memory and correctness do not depend on it."""
    import torch

    from remat.inductor._compat.compiling import compile_settings

    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with compile_settings({"cpp.simdlen": 1}):
        yield
    torch._dynamo.reset()
