"""Inductor's code for a GPU, run on a machine without one: its kernels go through Triton's interpreter.

Slow, and for small models alone; what is computed, and what is written over, is what a card would compute and write
over. `TRITON_INTERPRET=1` has to be set before Triton is imported, and `as_gpu.take_cpu_for_gpu` called.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from scipy import special
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_helpers
from triton.runtime.interpreter import TensorHandle

LARGEST_BLOCK = 4096
"""Elements that one call of a kernel's function computes: the interpreter takes its time for each call."""

_HEURISTICS = re.compile(r"^@triton_heuristics\..*?^(?=@triton\.jit)", re.MULTILINE | re.DOTALL)
_DIRECTIONS = ("x", "y", "z")
_NUMPY = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos")},
    **{name: getattr(np, name) for name in ("tanh", "floor", "ceil", "trunc", "rint", "abs", "isnan", "isinf")},
    "nearbyint": np.rint,
    "rsqrt": lambda values: (1 / np.sqrt(values)).astype(values.dtype),
    "erf": special.erf,
    "pow": np.power,
    "fmod": np.fmod,
    "atan2": np.arctan2,
}


class Interpreted:
    """A kernel, from its source."""

    def __init__(self, name: str, source: str) -> None:
        """The source as Inductor wrote it."""
        grid = re.search(r"'grid_type': '(\w+)'", source)
        if grid is None or grid[1] not in ("Grid1D", "Grid2D", "Grid3D"):
            raise NotImplementedError(f"{name}: a grid of kind {grid and grid[1]} is not interpreted")
        found: dict[str, Any] = {"__file__": __file__}
        path = _written(name, plain := _HEURISTICS.sub("", source))
        exec(compile(plain, path, "exec"), found)  # Inductor's own code, which a wrapper would import.
        found.update(libdevice=LIBRARY, tl_math=LIBRARY)
        self.function = found[name]
        given = inspect.signature(self.function.fn).parameters
        self.blocks = [name for name in given if name.endswith("BLOCK")]
        self.given = [name for name in given if name not in self.blocks]

    def run(self, *args: Any, stream: object = None, **options: Any) -> None:
        """As a wrapper calls it."""
        given = dict(zip(self.given, args, strict=True)) | options
        blocks: dict[str, int] = {}
        left = LARGEST_BLOCK
        for name in reversed(self.blocks):  # Along a sum first.
            numel = given[f"{name.removesuffix('BLOCK').lower()}numel"]
            blocks[name] = min(triton.next_power_of_2(numel), left)
            left = max(left // blocks[name], 1)
        sizes = [(given.get(f"{name}numel", 1), blocks.get(f"{name.upper()}BLOCK", 1)) for name in _DIRECTIONS]
        self.function[tuple(-(-numel // block) for numel, block in sizes)](**given, **blocks)


def interpret_kernels() -> None:
    """From now on."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton interprets kernels only where TRITON_INTERPRET=1 is set before it is imported")
    AsyncCompile.triton = lambda self, name, source, *args, **options: Interpreted(name, source)
    triton_helpers.libdevice = triton_helpers.math = LIBRARY
    # Triton would interpret these once more for each call, or for each pair of elements.
    triton_helpers.maximum, triton_helpers.minimum = _of_tensors(np.maximum), _of_tensors(np.minimum)
    triton_helpers.max2, triton_helpers.min2 = _of_tensors(np.max), _of_tensors(np.min)
    triton_helpers.welford = _welford


def _of_tensors(compute: Callable[..., Any]) -> Callable[..., Any]:
    """What `compute` does to arrays, to a kernel's tensors."""

    def function(*given: Any) -> Any:
        tensors = [item for item in given if isinstance(item, tl.tensor)]
        # A whole number, as ReLU's zero is, takes the type of what it is compared with.
        like = next((item for item in tensors if item.dtype.is_floating()), tensors[0])
        return _tensor(compute(*(item.handle.data if isinstance(item, tl.tensor) else item for item in given)), like)

    return function


def _tensor(values: Any, like: Any) -> Any:
    is_truth = values.dtype == np.bool_
    dtype = tl.int1 if is_truth else like.dtype
    handle = TensorHandle(values if is_truth else values.astype(like.handle.data.dtype), dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(values.shape)) if values.shape else dtype)


def _welford(means: Any, squares: Any, weights: Any, dim: int) -> tuple[Any, Any, Any]:
    data, spread, weight = (item.handle.data for item in (means, squares, weights))
    total = weight.sum(dim, keepdims=True)
    mean = (data * weight).sum(dim, keepdims=True) / total
    left = (spread + weight * (data - mean) ** 2).sum(dim, keepdims=True)
    mean, left, total = (_tensor(item.squeeze(dim), means) for item in (mean, left, total))
    return mean, left, total


_numbers = itertools.count()


def _written(name: str, source: str) -> str:
    """Where Triton, which reads a kernel's source once more, finds it."""
    path = f"<{name} {next(_numbers)}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    return path


LIBRARY = SimpleNamespace(**{name: _of_tensors(compute) for name, compute in _NUMPY.items()})
"""What kernels call of a card's library, by NumPy."""
