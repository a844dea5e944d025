"""How a step is called: by a function of its own, and by code that takes what it is given back, or drops it."""

from __future__ import annotations

import builtins
import dis
import itertools
import types
from collections.abc import Callable
from typing import Any

from remat.pytorch._compat.dynamo import ROOT

_numbers = itertools.count()


def root_function(step: Callable[..., Any]) -> Any:
    """A function of its own for each optimized step: Dynamo counts recompilations by code object, and puts what it
    compiled among the function's globals, where it would stay when the step is gone.
    """

    def root(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    code = root.__code__.replace(co_name=f"{ROOT}{next(_numbers)}")
    own_globals = {"__builtins__": builtins, "__name__": __name__}
    return types.FunctionType(code, own_globals, code.co_name, None, root.__closure__)


def result_is_dropped(called: types.FrameType | None) -> bool:
    """Whether the call of the function in a frame is a statement of its own, whose result nobody takes."""
    caller = called.f_back if called is not None else None
    if caller is None:
        return False
    following = (item for item in dis.get_instructions(caller.f_code) if item.offset > caller.f_lasti)
    return next((item.opname for item in following), "") == "POP_TOP"
