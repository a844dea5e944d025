"""The kernels of a compiled step: graphs that Dynamo finds are planned, and Inductor compiles them.

Whatever cannot be planned runs as torch.compile would run it, and what Inductor cannot compile runs in eager, each with
one warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from remat.inductor._compat.compiling import OLDEST, is_supported
from remat.inductor.graph import in_eager, left_to_torch
from remat.inductor.session import CompiledSession
from remat.inductor.shapes.open_step import open_step
from remat.inductor.stages import stage
from remat.pytorch._compat.dynamo import recurrent_layers_untraced
from remat.pytorch._compat.numbers import is_only_counted_with, make_numbers_constant
from remat.pytorch._compat.symbols import symbols_of
from remat.pytorch.run.backend import device_of
from remat.pytorch.run.contract import Compiled, FoundGraph
from remat.pytorch.run.gradients.twice import differentiable_again


@dataclass(frozen=True, slots=True)
class InductorKernels:
    """Hands Dynamo's graphs to a `CompiledSession`, which has Inductor compile them when they are first called."""

    session: CompiledSession

    def tracing(self) -> AbstractContextManager[None]:
        return recurrent_layers_untraced()

    def compile(self, found: FoundGraph) -> Compiled:
        if any(_is_empty(item) for item in found.inputs):
            warnings.warn("A graph that gets an empty batch is not compiled: it runs in eager.", stacklevel=2)
            self.session.left_out += 1
            return in_eager(found.module)
        make_numbers_constant(found.module, may_stay=is_only_counted_with)
        reason = _why_unplanned()
        if reason:
            self.session.left_out += 1
            return left_to_torch(found.module, found.inputs, f"A graph is not planned ({reason})")
        traced = [node.meta.get("example_value") for node in found.module.graph.find_nodes(op="placeholder")]
        symbols, device = symbols_of(traced), device_of(found.inputs)
        compiled: Compiled
        if symbols is not None:
            compiled = open_step(self.session, found, symbols, device)
        else:
            with stage("Following the plain step"):
                plain = found.plain_step()
            compiled = self.session.add_graph(found.module, plain, device, alone=found.alone)
        return differentiable_again(compiled, found.module, draws_as_eager=False)

    def leave(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        return left_to_torch(module, inputs, "A graph is not planned", quietly=True)


def _is_empty(item: Any) -> bool:
    """Whether this is a batch without rows, for which compiled kernels may expect other strides than torch's have."""
    return isinstance(item, torch.Tensor) and item.dim() > 1 and item.numel() == 0


def _why_unplanned() -> str:
    if not is_supported():
        return f"planning needs torch {OLDEST[0]}.{OLDEST[1]} or later, and this is {torch.__version__}"
    return ""
