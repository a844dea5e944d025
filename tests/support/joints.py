"""Joint graphs for tests: traced from small models without compiling them, and made up at random."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from remat.inductor._compat.compiling import compile_fx
from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.program import MeasuredRates
from remat.inductor.partition import Cut, Partitioner, Uncut


class _Traced(Exception):
    """The joint graph is there; nothing else is wanted."""


def uncut_of(model: nn.Module, *args: Any) -> Uncut:
    """The joint graph of a step as Inductor's partitioner gets it."""
    found: list[Uncut] = []

    def keep(uncut: Uncut) -> Cut:
        found.append(uncut)
        raise _Traced

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(module, inputs, config_patches={"custom_partitioner_fn": Partitioner(keep)})

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    except Exception:
        if not found:
            raise
    return found[0]


def rates_of(joint: Joint) -> MeasuredRates:
    """Kernels that run alone take a hundred times as long as moving a kilobyte."""
    alone = (number for number, node in enumerate(joint.nodes) if node.kind is Kind.ALONE and not node.is_part)
    return MeasuredRates(10.0, 100.0, dict.fromkeys(alone, 10_000.0))


@st.composite
def joints(draw: st.DrawFn, most_layers: int = 5) -> Joint:
    """A forward of layers that read some of the layers before, and its backward."""
    nodes: list[JointNode] = [_node("input", Kind.INPUT, Half.FORWARD, (), 0, 0)]

    def add(name: str, kind: Kind, phase: Half, reads: tuple[int, ...], size: int, recomputable: bool = True) -> int:
        nodes.append(_node(name, kind, phase, reads, len(nodes), size, recomputable))
        return len(nodes) - 1

    kinds = st.sampled_from([Kind.ALONE, Kind.FUSED, Kind.FUSED, Kind.SUM])
    forward: list[int] = [0]
    for layer in range(draw(st.integers(2, most_layers))):
        reads = tuple(draw(st.sets(st.sampled_from(forward), min_size=1, max_size=3)))
        size = draw(st.integers(1, 20)) * 100
        is_pure = draw(st.integers(0, 9)) > 0
        forward.append(add(f"layer_{layer}", draw(kinds), Half.FORWARD, tuple(sorted(reads)), size, is_pure))
    loss = add("loss", Kind.SUM, Half.FORWARD, (forward[-1],), 4)
    nodes.append(_node("tangents", Kind.INPUT, Half.BACKWARD, (), len(nodes), 0))
    gradient = len(nodes) - 1
    gradients: list[int] = []
    for layer in reversed(forward[1:]):
        needed = draw(st.sets(st.sampled_from([layer, *nodes[layer].reads]), min_size=1))
        gradient = add(
            f"grad_{layer}", draw(kinds), Half.BACKWARD, (gradient, *sorted(needed)), nodes[layer].size_bytes
        )
        if draw(st.booleans()):
            gradients.append(gradient)
    return Joint(tuple(nodes), frozenset([loss]), frozenset(gradients or [gradient]))


def _node(
    name: str, kind: Kind, phase: Half, reads: tuple[int, ...], number: int, size: int, recomputable: bool = True
) -> JointNode:
    return JointNode(name, f"test.{kind.value}", kind, phase, reads, number, size, max(size // 4, 1), recomputable)
