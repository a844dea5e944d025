"""Hugging Face transformers, traced as it runs in eager.

When transformers sees a tracer it builds a causal mask even where nothing is padded, in case shapes change later:
attention then takes a slower kernel and gives other bits than eager. Remat captures one shape at a time, so the answer
that eager gets is right. With a padding mask its contents would matter, and transformers decides as it likes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MODULE = "transformers.masking_utils"


@contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """While a model is traced, leave out masks that eager leaves out."""
    module: Any = sys.modules.get(MODULE)
    original = getattr(module, "is_tracing", None)
    if original is None or original is _is_tracing_padding:
        yield
        return
    module.is_tracing = _is_tracing_padding
    try:
        yield
    finally:
        module.is_tracing = original


def _is_tracing_padding(padding_mask: Any = None) -> bool:
    # One function for all calls: Dynamo recompiles where a global it has seen becomes another object.
    return padding_mask is not None
