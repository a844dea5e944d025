"""The two programs that a choice of saved values leads to.

In: a `Joint` and the nodes whose results are saved. Out: `Halves`: what forward runs, and what backward runs for which
of its own nodes. What is needed again runs just before its first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remat.inductor.model.joint import Half, Joint, Kind


@dataclass(frozen=True, slots=True)
class Halves:
    """What runs in forward, and in backward for which of its own nodes."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    runs_for: tuple[int, ...]


def split(joint: Joint, saved: frozenset[int]) -> Halves:
    """The two programs that a choice leads to."""
    nodes = joint.nodes
    in_forward = {number for number, node in enumerate(nodes) if node.phase is Half.FORWARD}
    waiting = [joint.maker(number) for number in saved if nodes[number].phase is Half.FREE]
    while waiting:
        number = waiting.pop()
        if number not in in_forward:
            in_forward.add(number)
            waiting.extend(nodes[number].reads)
    in_forward |= {number for number in saved if nodes[number].is_part}
    forward = tuple(number for number in joint.early if number in in_forward)
    backward: list[int] = []
    runs_for: list[int] = []
    there = {number for number, node in enumerate(nodes) if node.kind is Kind.INPUT} | saved
    for number, node in enumerate(nodes):
        if node.phase is Half.BACKWARD and node.kind is not Kind.INPUT:
            missing = [] if there.issuperset(node.reads) else _missing(joint, node.reads, there)
            for earlier in (*missing, number):
                backward.append(earlier)
                runs_for.append(number)
                there.add(earlier)
    gradients = [number for number in sorted(joint.gradients) if number not in there]
    for earlier in _missing(joint, gradients, there):
        backward.append(earlier)
        runs_for.append(backward[-1] if not runs_for else runs_for[-1])
        there.add(earlier)
    return Halves(forward, tuple(backward), tuple(runs_for))


def pruned(joint: Joint, saved: frozenset[int]) -> frozenset[int]:
    """Without what backward never reads."""
    nodes = joint.nodes
    read = {item for number in split(joint, saved).backward for item in nodes[number].reads} | joint.kept
    # A gradient that the forward computes is returned, and read by nobody.
    return frozenset(number for number in saved if number in read or nodes[number].owner in joint.gradients)


def _missing(joint: Joint, wanted: Iterable[int], there: set[int]) -> list[int]:
    """What has to run before `wanted` are there, in order."""
    found: dict[int, None] = {}
    stack = [(number, False) for number in reversed(list(wanted))]
    while stack:
        number, is_done = stack.pop()
        if number in there or number in found:
            continue
        if is_done:
            found[number] = None
            continue
        stack.append((number, True))
        stack.extend((read, False) for read in reversed(joint.nodes[number].reads))
    return list(found)
