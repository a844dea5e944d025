"""Only a CUDA device's allocator can be held to a plan; the rest is tested there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import remat


def test_says_so_where_there_is_no_such_allocator() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    step = remat.optimize(lambda x: model(x).sum(), "10x", progress=False)
    with pytest.raises(remat.RematError, match="no plan yet"), remat.capped(step):
        pass
    step(torch.randn(4, 8)).backward()
    with pytest.raises(remat.RematError, match="CUDA"), remat.capped(step):
        pass
