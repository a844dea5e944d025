"""What Dynamo meets while it traces a step: the places where it stopped, and why it traced something anew."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.utils import guard_failures
from torch._guards import TracingContext

_REMAT = str(Path(__file__).parents[2])
_LIBRARIES = (str(Path(torch.__file__).parent), _REMAT)
"""Folders whose lines are nobody's own code."""
_ENDS_STEP = re.compile(r"Tensor\.backward|autograd\.backward|Optimizer\.|profile_hook_step|\.step\b")
"""What ends a step's forward by its nature: its backward, and the update."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A place that Dynamo could not trace."""

    file: str
    """Empty where no line of the user's own code leads there."""
    line: int
    reason: str
    """Dynamo's words, all of them."""
    leaves_function: bool
    """Whether the whole function around it runs untraced, not just this line."""
    in_remat: bool = False
    """Whether it is in code that Remat runs between graphs, which nobody wants traced."""

    @property
    def is_expected(self) -> bool:
        """Whether it is nothing about the user's code: the end of the forward, or Remat's own work."""
        return self.in_remat or _ENDS_STEP.search(self.reason) is not None


@contextlib.contextmanager
def stops_noted(found: list[Stop]) -> Iterator[None]:
    """Add to `found` each place where Dynamo stops meanwhile, once; its log may be off, so it is asked directly."""
    log = InstructionTranslatorBase.log_graph_break

    def noting(translator: Any, options: Any, reason: str, *args: Any, **kwargs: Any) -> None:
        error = next((item for item in (*args, *kwargs.values()) if isinstance(item, BaseException)), None)
        _note(found, _stop(reason, error))
        log(translator, options, reason, *args, **kwargs)

    InstructionTranslatorBase.log_graph_break = noting
    try:
        yield
    finally:
        InstructionTranslatorBase.log_graph_break = log


def _stop(reason: str, error: BaseException | None) -> Stop:
    stack = getattr(error, "real_stack", None) or TracingContext.extract_stack()
    own = [frame for frame in stack if not frame.filename.startswith(_LIBRARIES)]
    file, line = (own[-1].filename, own[-1].lineno or 0) if own else ("", 0)
    # The function in which a step is called has a name of its own (`optimize.py`).
    ours = [frame for frame in stack if frame.filename.startswith(_REMAT) and not frame.name.startswith("remat_step_")]
    text = reason if error is None else str(error)
    return Stop(file, line, text, "Skipping the function" in reason, in_remat=bool(ours) and not own)


def _note(found: list[Stop], stop: Stop) -> None:
    """Dynamo tells a place again for each function that it is traced in; the first time says most."""
    for number, other in enumerate(found):
        is_same = (other.file, other.line) == (stop.file, stop.line) and (stop.file or other.reason == stop.reason)
        if is_same:
            found[number] = replace(other, leaves_function=other.leaves_function or stop.leaves_function)
            return
    found.append(stop)


def retrace_reasons() -> list[str]:
    """Why Dynamo has traced functions anew so far: what is not as it was, with the line that depends on it."""
    return [str(getattr(reason, "reason", reason)) for reasons in guard_failures.values() for reason in reasons]
