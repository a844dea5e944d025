"""`torch.rand([]) < 0.0`, as models ask that could leave out layers at random and do not: known while tracing.

Dynamo does not know what a random number will be, gives up the loop over all layers, and traces each by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables import ConstantVariable, TensorVariable

LESS = "<"


@contextlib.contextmanager
def draws_compared() -> Iterator[None]:
    """A random number between 0 and 1 is less than nothing that is 0 or less, and than all that is 1 or more. It is
    drawn all the same.
    """
    handle = compare_op_handlers[LESS]

    def handled(translator: Any, args: Any, kwargs: Any) -> Any:
        drawn, limit = (item.realize() for item in args)
        known = _is_draw(drawn) and isinstance(limit, ConstantVariable) and isinstance(limit.value, int | float)
        if known and not 0 < limit.value < 1:
            return ConstantVariable.create(limit.value >= 1)
        return handle(translator, args, kwargs)

    compare_op_handlers[LESS] = handled
    try:
        yield
    finally:
        compare_op_handlers[LESS] = handle


def _is_draw(variable: Any) -> bool:
    if not isinstance(variable, TensorVariable):
        return False
    node = variable.as_proxy().node
    return node.target is torch.rand and node.meta["example_value"].numel() == 1
