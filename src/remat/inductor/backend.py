"""The torch.compile backend that plans and then lets Inductor compile.

Whatever cannot be planned runs as torch.compile would run it, and what Inductor cannot compile runs in eager, each with
one warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from remat.inductor._compat import OLDEST, is_supported
from remat.inductor.compile import build_plainly
from remat.pytorch.backend import Compiled, SessionBackend, device_of
from remat.pytorch.plain import plain_step


class CompiledBackend(SessionBackend):
    """Hands Dynamo's graphs to a `CompiledSession`."""

    def _compile(self, module: GraphModule, inputs: Sequence[Any], alone: bool, breaks_off: bool) -> Compiled:
        reason = _why_unplanned(inputs)
        if reason:
            warnings.warn(f"A graph is compiled as torch.compile would, unplanned: {reason}.", stacklevel=2)
            self.session.left_out += 1
            return build_plainly(module, inputs)
        device = device_of(inputs)
        graph: Compiled = self.session.add_graph(module, plain_step(module, inputs, device), device, alone=alone)
        return graph

    def _unplanned(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        return build_plainly(module, inputs)


def _why_unplanned(inputs: Sequence[Any]) -> str:
    if not is_supported():
        return f"planning needs torch {OLDEST[0]}.{OLDEST[1]} or later, and this is {torch.__version__}"
    if any(isinstance(item, torch.SymInt) for item in inputs):
        return "it has dynamic shapes; pass dynamic=False to plan each shape"
    return ""
