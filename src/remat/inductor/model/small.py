"""Small values that backward would make again are saved in place of what they are made from.

In: a joint graph and what is saved of it. Out: the same with the last small values on the way to backward: the inverse
deviation of a row rather than its variance, padded labels rather than labels. They hardly need memory, and a kernel
that makes them again has so many ops that Inductor computes it in two parts, of which the second cannot write over
what the first reads.
"""

from __future__ import annotations

from remat.inductor.model.joint import Half, Joint, Kind
from remat.inductor.model.split import pruned, split

Saved = frozenset[int]


def with_small(joint: Joint, saved: Saved, most_bytes: int) -> Saved:
    """See the module's docstring; small is what takes at most `most_bytes`."""
    again = split(joint, saved).backward
    small = {number for number in again if number not in saved and _is_small(joint, number, most_bytes)}
    read_by_others = {read for number in again if number not in small for read in _seen(joint, number)}
    found = small & read_by_others
    return pruned(joint, saved | found) if found else saved


def _is_small(joint: Joint, number: int, most_bytes: int) -> bool:
    """Views are neither: whoever reads one reads what it shows."""
    node = joint.nodes[number]
    is_made = node.kind in (Kind.FUSED, Kind.SUM) and joint.nodes[joint.maker(number)].recomputable
    return is_made and node.phase is Half.FORWARD and 0 < node.size_bytes <= most_bytes


def _seen(joint: Joint, number: int) -> tuple[int, ...]:
    return () if joint.nodes[number].kind is Kind.VIEW else joint.owners[number]
