"""A graph as Inductor compiled it, and how a backward's arguments follow from its forward's outputs.

In: what `compile_fx` hands to its `inner_compile`. Out: a `Compiled`, with everything a dry run needs and none of the
kernels. `recording` stands where `compile_fx_inner` would and keeps one for each graph, on cache hits too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from remat.inductor.dry_run.timeline import CannotFollow

_TANGENT = "tangents_"
_STATE = "rng_state"


@dataclass(frozen=True, slots=True)
class Compiled:
    source: str
    """Inductor's wrapper code."""
    inputs: tuple[Any, ...]
    """As the graph was traced with them, fake or real."""
    input_names: tuple[str, ...]
    """Of the graph's placeholders."""
    output_names: tuple[str, ...]
    """Of the nodes that the graph returns; empty for what is no node."""
    constants: Mapping[str, Any]
    """Tensors that the code finds among its globals."""
    is_backward: bool
    code_key: str = ""
    """Under which Inductor knows the code that it has loaded."""


def recording(compile_inner: Callable[..., Any], found: list[Compiled]) -> Callable[..., Any]:
    """`compile_inner`, adding each graph that it compiles to `found`."""

    def compile_and_keep(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        # Compiling rewrites the graph: its names are read before.
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        results = [getattr(item, "name", "") for item in _results(module)]
        output = compile_inner(module, inputs, **options)
        is_backward = bool(options.get("is_backward", False))
        found.append(compiled_graph(output, inputs, names, results, is_backward=is_backward))
        return output

    return compile_and_keep


def compiled_graph(
    output: Any, inputs: Sequence[Any], input_names: Sequence[str], output_names: Sequence[str], *, is_backward: bool
) -> Compiled:
    """From a `CompiledFxGraph`. What has no source is refused by the dry run; it must not stop the compiler."""
    source = getattr(output, "source_code", None) or ""
    constants = {**(getattr(output, "constants", None) or {}), **getattr(output, "torchbind_constants", {})}
    names = tuple(input_names), tuple(output_names)
    return Compiled(source, tuple(inputs), *names, constants, is_backward, getattr(output, "cache_key", ""))


def saved_outputs(forward: Compiled, backward: Compiled) -> list[int | None]:
    """For each argument of `backward` the place of the forward output that it is.

    The partitioner gives a saved value the same name on both sides, except for states of random number generators;
    those take what is left among the last outputs, in their order. None stands for what does not come from forward:
    an incoming gradient, or something that is no tensor, as a generator.
    """
    places = {name: place for place, name in enumerate(forward.output_names)}
    saved = [places.get(name) for name in backward.input_names]
    unnamed = [number for number, place in enumerate(saved) if place is None and _is_state(backward, number)]
    visible = len(forward.output_names) - (len(saved) - saved.count(None) + len(unnamed))
    left = [place for place in range(max(0, visible), len(forward.output_names)) if place not in saved]
    for number, place in zip(unnamed, left, strict=False):
        saved[number] = place
    for name, found, like in zip(backward.input_names, saved, backward.inputs, strict=True):
        if found is None and isinstance(like, torch.Tensor) and not name.startswith(_TANGENT):
            raise CannotFollow(f"Backward takes {name!r}, which forward does not return; measure the step instead.")
    return saved


def _is_state(backward: Compiled, number: int) -> bool:
    return backward.input_names[number].startswith(_STATE) and isinstance(backward.inputs[number], torch.Tensor)


def _results(module: torch.fx.GraphModule) -> Sequence[Any]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    results = output.args[0]
    return results if isinstance(results, tuple | list) else (results,)
