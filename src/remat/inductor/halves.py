"""Inductor's code for the two halves of a graph, made to do what eager does where torch.compile's fails.

In: `compile_fx_inner` or what stands in its place. Out: the same, with code that

- returns a tensor of its own for every output: Inductor returns the same one for `x` and `x.detach()`, and autograd
  then takes both for what has no gradient;
- gets copies of what forward saved where another backward is to read that again: Inductor's code writes into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from remat.inductor._compat.compiling import boxed, forward_output_count, take_donated
from remat.pytorch._compat.engine import keeps_graph

Code = Callable[[list[Any]], Any]


def as_eager_runs_it(compile_inner: Callable[..., Any]) -> Callable[..., Any]:
    """`compile_inner` with code that is called as eager's would be."""

    def compile_and_wrap(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        code = compile_inner(module, inputs, **options)
        if not options.get("is_backward"):
            return boxed(_with_own_outputs(code, forward_output_count()))
        donated = take_donated()
        # torch 2.11 calls it with gradients on where they are to be differentiated again, which these cannot be.
        return boxed(torch.no_grad()(_keeping_what_is_saved(code, donated) if donated else code))

    return compile_and_wrap


def _with_own_outputs(code: Code, count: int) -> Code:
    """`code`, of whose first `count` results no two are one tensor."""
    repeated: list[int] | None = None

    def run(arguments: list[Any]) -> Any:
        nonlocal repeated
        results = code(arguments)
        if repeated is None:
            repeated = _repeated(results[:count])
        if not repeated:
            return results
        results = list(results)
        for place in repeated:
            results[place] = results[place].detach()
        return results

    return run


def _repeated(results: Sequence[Any]) -> list[int]:
    """Places of tensors that stand further to the front, too."""
    first: dict[int, int] = {}
    for place, item in enumerate(results):
        if isinstance(item, torch.Tensor):
            first.setdefault(id(item), place)
    return [place for place, item in enumerate(results) if isinstance(item, torch.Tensor) and first[id(item)] != place]


def _keeping_what_is_saved(code: Code, donated: Sequence[int]) -> Code:
    """`code`, which writes into its `donated` arguments, but not while autograd keeps them for another backward."""
    has_warned = False

    def run(arguments: list[Any]) -> Any:
        nonlocal has_warned
        if keeps_graph():
            if not has_warned:
                warnings.warn(
                    "A backward keeps its graph (retain_graph=True): compiled code writes into what forward saved, so "
                    "it gets copies of that, and this step can exceed the budget.",
                    stacklevel=2,
                )
            has_warned = True
            for place in donated:
                arguments[place] = _copy(arguments[place])
        return code(arguments)

    return run


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides, gaps between elements and all: the code counts on them."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)
