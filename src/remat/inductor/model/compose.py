"""Several joint graphs of one step as one: forwards in the order of their calls, backwards in reverse.

In: the `Joint` of each call. Out: one `Joint` in which all share the memory, and where each call's nodes went. What one
graph returns stays in memory to the end, as nobody knows who else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from remat.inductor.model.joint import Half, Joint, JointNode, Kind
from remat.inductor.model.program import MeasuredRates


@dataclass(frozen=True, slots=True)
class Composed:
    joint: Joint
    rates: MeasuredRates
    places: tuple[tuple[int, ...], ...]
    """For each call, the number that each of its nodes has in the whole."""

    def part(self, call: int, chosen: frozenset[int]) -> frozenset[int]:
        """Of nodes of the whole, those of one call, by its own numbers."""
        return frozenset(number for number, place in enumerate(self.places[call]) if place in chosen)


def compose(joints: Sequence[Joint], rates: Sequence[MeasuredRates]) -> Composed:
    """See the module's docstring."""
    places: list[dict[int, int]] = [{} for _ in joints]
    order: list[tuple[int, int]] = []
    for call, joint in enumerate(joints):
        order += [(call, number) for number, node in enumerate(joint.nodes) if node.phase is Half.FORWARD]
    for call in reversed(range(len(joints))):
        nodes = joints[call].nodes
        order += [(call, number) for number, node in enumerate(nodes) if node.phase is not Half.FORWARD]
    for place, (call, number) in enumerate(order):
        places[call][number] = place
    last = len(joints) - 1
    nodes = tuple(_moved(joints[call].nodes[number], places[call], is_last=call == last) for call, number in order)

    def all_of(kind: str) -> frozenset[int]:
        return frozenset(places[call][number] for call, joint in enumerate(joints) for number in getattr(joint, kind))

    whole = Joint(nodes, all_of("forward_outputs"), all_of("gradients"), all_of("kept"))
    first = rates[0]
    return Composed(
        whole,
        replace(
            first,
            alone_ns={
                places[call][key]: time for call, item in enumerate(rates) for key, time in item.alone_ns.items()
            },
            workspace_bytes={
                places[call][key]: size for call, item in enumerate(rates) for key, size in item.workspace_bytes.items()
            },
        ),
        tuple(
            tuple(place[number] for number in range(len(joint.nodes)))
            for place, joint in zip(places, joints, strict=True)
        ),
    )


def _moved(node: JointNode, places: dict[int, int], *, is_last: bool) -> JointNode:
    """The gradients that a call is given are those that later calls return, and counted there."""
    is_counted = node.kind is Kind.INPUT and node.phase is Half.BACKWARD and not is_last
    return replace(
        node,
        reads=tuple(places[read] for read in node.reads),
        owner=places[node.owner],
        size_bytes=0 if is_counted else node.size_bytes,
    )
