"""Models built without memory: a factory runs on fake tensors, so that its model may be of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from remat.pytorch._compat.fakes import FakeTensorMode, fakes_can_be_converted


@contextmanager
def builds_fakes() -> Iterator[None]:
    """While this lasts, new tensors have shapes and no memory; real ones that are met become fake."""
    with FakeTensorMode(allow_non_fake_inputs=True), fakes_can_be_converted():
        yield
