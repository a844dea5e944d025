"""What a mode of torch.compile asks of Inductor, under a budget.

In: a mode, as torch.compile takes it. Out: Inductor's settings. CUDA graphs are left out: they keep what a step needs
from one step to the next, beside what other steps and the optimizer need, and no budget can hold under that.
"""

from __future__ import annotations

import warnings
from typing import Any

from remat.errors import RematError
from remat.inductor._compat.compiling import modes

_GRAPHS = "triton.cudagraphs"


def settings_of(mode: str | None) -> dict[str, Any]:
    """Says once where something of the mode is left out."""
    known = modes()
    if mode is not None and mode not in known:
        raise RematError(f"torch.compile has no mode {mode!r}; it has {', '.join(known)}.")
    asked = dict(known[mode]) if mode is not None else {}
    if asked.pop(_GRAPHS, False):
        warnings.warn(
            f"mode={mode!r} asks for CUDA graphs, which hold a step's memory from one step to the next; under a budget "
            "the step runs without them.",
            stacklevel=2,
        )
    return {**asked, _GRAPHS: False}
