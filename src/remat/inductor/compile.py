"""One graph of a step, compiled by Inductor under a choice of what to save.

In: a graph as Dynamo gives it, its inputs, and who decides. Out: a `Compiled`: a function to call, and what Inductor made
for forward and backward. Both are made at once, so that what they need is known before anything runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from remat.inductor._compat import compile_fx, compile_half, compiling_both_halves
from remat.inductor.partition import Decide, Partitioner


@dataclass(slots=True)
class Compiled:
    call: Callable[..., Any]
    halves: list[tuple[bool, Any]] = field(default_factory=list)
    """(whether it is a backward, what Inductor made for it)."""


def compile_graph(module: GraphModule, inputs: Sequence[Any], decide: Decide) -> Compiled:
    """Compile a copy of `module`: what was compiled once can be compiled again under another choice."""
    halves: list[tuple[bool, Any]] = []

    def half(graph: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        made = compile_half(graph, example_inputs, **options)
        halves.append((bool(options.get("is_backward", False)), made))
        return made

    patches = {"custom_partitioner_fn": Partitioner(decide)}
    with compiling_both_halves():
        call = compile_fx(copy.deepcopy(module), list(inputs), inner_compile=half, config_patches=patches)
    return Compiled(call, halves)


def compile_plainly(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """As torch.compile would."""
    call: Callable[..., Any] = compile_fx(module, list(inputs))
    return call
