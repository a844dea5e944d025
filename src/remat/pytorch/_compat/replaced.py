"""A function or a setting of torch's, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(place: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`place.name` is what `make` makes of it; inside of another such replacement it stays."""
    original = getattr(place, name)
    replacement = make(original)
    if getattr(original, "__qualname__", "") == replacement.__qualname__:
        yield
        return
    setattr(place, name, replacement)
    try:
        yield
    finally:
        setattr(place, name, original)


@contextlib.contextmanager
def settings_changed(config: Any, **settings: Any) -> Iterator[None]:
    """As `config.patch`, of which torch 2.13 keeps something for good each time: a step begins with several."""
    before = {name: getattr(config, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
