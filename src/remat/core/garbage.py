"""Python's garbage collector, kept from going through what is there already."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 100_000
"""So many new objects are made before Python looks for garbage among them; by itself it does after 700 to 2,000."""


@contextmanager
def collecting_only_what_is_new() -> Iterator[None]:
    """Many small objects would make Python look through all others, such as a model's, again and again."""
    is_frozen = gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    try:
        with collecting_rarely():
            yield
    finally:
        if not is_frozen:
            gc.unfreeze()


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """As above, where what is there already must still be found by `gc.get_objects`."""
    often, *others = gc.get_threshold()
    gc.set_threshold(max(often, NEW_OBJECTS) if often else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(often, *others)
