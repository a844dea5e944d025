"""Make it fit: precision, recomputation, offload, sharding, accumulation and pipelines, chosen together.

`remat.fit(model, *batch, gpu=…, gpus=…)` is the whole of it; this package can be called as that function is.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallableRoom(types.ModuleType):
    """`remat.fit` is a folder of the package and the function that people call: a module may be both."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from remat.fit.found import fit

        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
