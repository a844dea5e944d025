"""Every kind of block, by name; one file for each idea."""

from __future__ import annotations

import tests.fuzz.index_blocks
import tests.fuzz.layer_blocks
import tests.fuzz.memory_blocks
import tests.fuzz.pointwise_blocks
import tests.fuzz.wrapper_blocks  # noqa: F401
from tests.fuzz.parts import BLOCKS

__all__ = ["BLOCKS"]
