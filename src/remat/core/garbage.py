"""Python's garbage collector, kept from going through what is there already."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_only_what_is_new() -> Iterator[None]:
    """Many small objects would make Python look through all others, such as a model's, again and again."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
