"""Inductor's code for a GPU, on a machine without one: nothing of it can run, but all of it can be read.

Inductor is made to take the CPU for a card: it lowers to Triton by the rules for GPUs, with the figures of an H200.
Triton has to be installed (`pip install triton`), no driver is needed. It changes torch for good: for processes that do
nothing else.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch._inductor.codegen.triton
import torch._inductor.compile_fx
import torch._inductor.config
import torch._inductor.graph
import torch._inductor.ir
import torch._inductor.lowering
import torch._inductor.scheduler
import torch.utils._triton
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import GPU_TYPES
from torch._subclasses.fake_tensor import FakeTensor

H200 = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)


class Unmade:
    """In place of a kernel."""

    def run(self, *args: Any, **options: Any) -> None:
        """Nothing is computed."""


def is_possible() -> bool:
    return find_spec("triton") is not None


def take_cpu_for_gpu() -> None:
    """From now on; see the module's docstring."""
    torch._inductor.config.cpu_backend = "triton"
    GPU_TYPES.append("cpu")
    DeviceProperties.create = classmethod(lambda cls, device: H200)
    AsyncCompile.triton = lambda self, *args, **options: Unmade()
    scheduler = torch._inductor.scheduler
    scheduler.BaseSchedulerNode.is_cpu = lambda self: False
    scheduler.Scheduler.create_backend = lambda self, device: torch._inductor.codegen.triton.TritonScheduling(self)
    scheduler.device_need_guard = lambda device: False
    torch._inductor.graph.SUPPORTED_MKLDNN_DEVICES = ()
    # Numbers of one element are read where they are, and not handed over by value.
    torch._inductor.graph.GraphLowering.is_unspec_arg = lambda self, name: False
    _lay_out_attention_as_on_gpus()
    # Names that other modules have imported are theirs.
    for module in [item for name, item in sys.modules.items() if name.startswith("torch.")]:
        _replace(module, "is_cpu", lambda item: False)
        _replace(module, "triton_hash_with_backend", lambda *args: "none")


def _lay_out_attention_as_on_gpus() -> None:
    """Its inputs have to be aligned there; that is asked of the fake tensors of a graph."""
    found = torch._inductor.lowering._maybe_layout_constraints
    asked = torch._inductor.lowering.sdpa_constraint

    def constraint(node: torch.fx.Node, *args: Any, **options: Any) -> Any:
        FakeTensor.is_cuda = True
        try:
            return asked(node, *args, **options)
        finally:
            del FakeTensor.is_cuda

    found.update({op: constraint for op, before in found.items() if before is asked})


def _replace(module: ModuleType, name: str, function: Any) -> None:
    if callable(vars(module).get(name)):
        setattr(module, name, function)
