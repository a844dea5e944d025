"""What a wrapper's text says of its kernels.

In: the source of a compiled graph. Out: a `KernelText` for each kernel that Inductor generated: the nodes that its
first call computes, from the comment above its definition, and what decides whether it can run on made-up tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_NODE = re.compile(r"#\s+%(\w+) : .*? = call_function\[target=torch\.ops\.([\w.]+)\]")
_INTEGERS = re.compile(r"#\s+%(\w+) : Tensor \"i(?:16|32|64)\[\w.* = PlaceHolder\[")
_KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\(")
_HEAD = re.compile(r"def (triton_\w+)\((.*)\):")
_BY_INDEX = ("embedding", "index", "gather", "scatter")
"""Parts of the names of ops that go by what indices say: made-up ones take another time, or lie outside."""
_SEEDS = "inductor_seeds"
_COUNTED = ("sem_ptr", "ws_ptr")
"""Arguments in which blocks of a kernel count each other: they must be 0 before each run."""


@dataclass(frozen=True, slots=True)
class KernelText:
    nodes: tuple[str, ...]
    """Of the graph that was compiled, by name."""
    goes_by_index: bool = False
    """Whether how long it takes, or whether it may run at all, can depend on what the integers are that it reads."""
    counts_blocks: bool = False
    in_place: int = 0
    """So many of its first arguments are read and written."""


def read_kernels(source: str) -> dict[str, KernelText]:
    found: dict[str, KernelText] = {}
    nodes: dict[str, str] = {}
    integers: set[str] = set()
    for line in source.splitlines():
        if node := _NODE.match(line):
            nodes[node[1]] = node[2]
        elif given := _INTEGERS.match(line):
            integers.add(given[1])
        elif kernel := _KERNEL.match(line):
            indices = {name for name in integers if not name.startswith(_SEEDS)}
            by_index = bool(indices) and any(word in op for op in nodes.values() for word in _BY_INDEX)
            found[kernel[1]], nodes, integers = KernelText(tuple(nodes), by_index), {}, set()
        elif (head := _HEAD.match(line)) and head[1] in found:
            counts = any(word in head[2] for word in _COUNTED)
            found[head[1]] = replace(found[head[1]], counts_blocks=counts, in_place=head[2].count("in_out_ptr"))
    return found
