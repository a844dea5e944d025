"""Every use of a private torch module, in one place. Tried on torch 2.11 and 2.13.

Each function says which private thing it needs and why no public one does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._C._profiler import _ExperimentalConfig
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import ProfilerConfig, ProfilerState

__all__ = [
    "BackendCompilerFailed",
    "FakeTensor",
    "FakeTensorMode",
    "aot_autograd",
    "detect_fake_mode",
]


@contextlib.contextmanager
def eager_dropout_on_cpu() -> Iterator[None]:
    """Trace dropout on CPU as eager PyTorch computes it.

    While tracing, torch replaces `aten.dropout` by `native_dropout`, which eager uses on CUDA only: on CPU eager
    multiplies by scaled noise, and the two differ in bits and in memory. Taking torch's Python kernels away for the
    time of the trace lets the C++ composite decide, as in eager.
    """
    op = torch.ops.aten.dropout.default
    kernels = dict(op.py_kernels)
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    try:
        for key in keys:
            op.py_kernels.pop(key, None)
        op._dispatch_cache.clear()
        yield
    finally:
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()


def keeps_graph() -> bool:
    """Whether the backward pass now running was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
