"""Models that stand beside the step in the code that calls it, and are not trained: a teacher, a moving average.

The CUDA allocator tells what they hold; on a CPU nobody does, and nothing leads from the step to them. In: the call of
a step that is not planned yet. Out: models that the calling code names, of its file's globals or its functions' own
variables, and that are in evaluation mode or have nothing to train. One in training mode may be anything, and is not
counted.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

from torch import nn

from remat.pytorch.reach import is_library

MOST_FRAMES = 8
"""Of the user's code, from the call of the step outwards."""


class ModelsBeside:
    """What was seen beside the calls of one step; it keeps no model alive."""

    def __init__(self) -> None:
        self._noted: dict[int, weakref.ref[nn.Module]] = {}

    def look(self) -> None:
        """Note the models that those know who call the step now."""
        for frame in _users_frames(inspect.currentframe()):
            for item in _named_in(frame):
                for module in _modules_in(item):
                    if not module.training or not _is_trained(module):
                        self._noted[id(module)] = weakref.ref(module)

    def models(self) -> list[nn.Module]:
        """Those that are still alive."""
        return [module for reference in self._noted.values() if (module := reference()) is not None]


def _users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    found = 0
    while frame is not None and found < MOST_FRAMES:
        if not _is_installed(frame):
            found += 1
            yield frame
        frame = frame.f_back


def _named_in(frame: FrameType) -> list[object]:
    """What the code that runs names of its file's globals, and a function's own variables."""
    names = frame.f_globals
    found = [names[name] for name in frame.f_code.co_names if name in names]
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        variables = frame.f_locals
        found.extend(variables.values())
        if sys.version_info < (3, 13):
            # A copy that stays in the frame: nothing that the function deletes would be freed.
            variables.clear()
    return found


def _modules_in(item: object) -> Iterator[nn.Module]:
    """The item itself, or what it holds at once: a walk through all that it knows could lead anywhere."""
    if isinstance(item, nn.Module):
        yield item
    elif isinstance(item, (list, tuple)):
        yield from (member for member in item if isinstance(member, nn.Module))
    elif not isinstance(item, (type, ModuleType)):
        members = item if isinstance(item, dict) else getattr(item, "__dict__", {})
        yield from (member for member in members.values() if isinstance(member, nn.Module))


def _is_installed(frame: FrameType) -> bool:
    """Whether a library's code runs, or ours."""
    file = frame.f_code.co_filename
    return file.startswith(_OWN) or "-packages" in file or is_library(str(frame.f_globals.get("__name__", "")))


_OWN = str(Path(__file__).parents[2])


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
