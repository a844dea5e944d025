"""How long the stages of getting ready take, told in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def stage(what: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        _log.info("%s: %.1f s.", what, time.perf_counter() - began)
