"""What people save by hand.

In: a joint graph. Out: nodes to save. Blocks are told by numbers in the paths of modules, as in `layers.3`.
"""

from __future__ import annotations

import re

from remat.inductor.model.joint import Half, Joint, Kind

_BLOCK = re.compile(r"^(.*?\b\d+)\b")


def matmuls(joint: Joint) -> frozenset[int]:
    """Inputs of the model's blocks, results of every kernel that runs alone in them, and what cannot run again."""
    alone = [
        number
        for number, node in enumerate(joint.nodes)
        if node.kind is Kind.ALONE and joint.nodes[joint.maker(number)].phase is Half.FORWARD and node.size_bytes
    ]
    within = [number for number in alone if _block(joint.nodes[number].module)]
    return block_inputs(joint) | frozenset(within or alone)


def block_inputs(joint: Joint) -> frozenset[int]:
    """What one block of the model hands to the next, and what cannot run again."""
    nodes = joint.nodes
    found: set[int] = set()
    for node in nodes:
        if node.phase is not Half.FORWARD or node.kind in (Kind.VIEW, Kind.INPUT):
            continue
        for owner in {nodes[read].owner for read in node.reads}:
            maker = nodes[owner]
            crosses = _block(maker.module) != _block(node.module)
            if crosses and maker.size_bytes and maker.kind is not Kind.INPUT and not node.is_part:
                found.add(owner)
    return must_save(joint) | frozenset(found)


def must_save(joint: Joint) -> frozenset[int]:
    """What cannot run again, unless it is written over: a sum that grows piece by piece is there only at its end.

    Of an op that returns several tensors these are saved, also what backward alone reads.
    """
    nodes = joint.nodes
    return frozenset(
        number
        for number, node in enumerate(nodes)
        if nodes[joint.maker(number)].phase is Half.FORWARD
        and not any(nodes[reader].is_part for reader in joint.readers[number])
        and node.kind not in (Kind.INPUT, Kind.VIEW)
        and not nodes[joint.maker(number)].recomputable
        and node.elements
        and not any(nodes[reader].in_place for reader in joint.readers[number])
    )


def _block(module: str) -> str:
    match = _BLOCK.match(module)
    return match[1] if match else ""
