"""What compiled code will need for a choice of saved values: its memory over the step and its time.

In: a `Joint`, the nodes whose results are saved, what kernels cost. Out: a `Prediction`. The backward runs what it
needs again just before its first use; `program.py` knows what of that is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from remat.inductor.model.joint import Half, Joint, Kind
from remat.inductor.model.program import HalfProgram, MeasuredRates
from remat.inductor.model.split import split


class Moment(NamedTuple):
    """One node of the joint graph as it runs."""

    node: int
    in_backward: bool
    at: int
    """In backward, the node of the joint graph's backward that this one runs for; itself in forward."""
    live_bytes: int
    time_ns: float
    """Of a kernel that computes several, all of it is at the last."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Bytes beyond what is there when the step begins."""

    moments: tuple[Moment, ...]
    time_ns: float
    alone_ns: float
    """Of this, what kernels that run alone take."""
    saved_bytes: int
    in_memory: frozenset[int]
    """Nodes of the backward that are run again and whose results are in memory for a while."""

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.live_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.live_bytes


def predict(joint: Joint, saved: frozenset[int], rates: MeasuredRates) -> Prediction:
    """See the module's docstring."""
    halves = split(joint, saved)
    kept = {joint.nodes[number].owner for number in saved}
    kept = {number for number in kept if joint.nodes[number].kind is not Kind.INPUT}
    forward = HalfProgram(joint, halves.forward, frozenset(kept) | joint.forward_outputs, frozenset(), rates)
    backward = HalfProgram(joint, halves.backward, joint.gradients, frozenset(kept | joint.tangents), rates)
    copied = sum(node.size_bytes for node in joint.nodes if node.is_copied)
    first = zip(halves.forward, forward.timeline(copied), forward.times_ns(), strict=True)
    after = copied + sum(joint.nodes[number].size_bytes for number in kept | joint.forward_outputs | joint.tangents)
    second = zip(halves.backward, halves.runs_for, backward.timeline(after), backward.times_ns(), strict=True)
    moments = [Moment(node, False, node, live, time_ns) for node, live, time_ns in first]
    moments += [Moment(node, True, at, live, time_ns) for node, at, live, time_ns in second]
    again = frozenset(
        number
        for number in halves.backward
        if joint.nodes[number].phase is not Half.BACKWARD and number in backward.real
    )
    time_ns = sum(moment.time_ns for moment in moments)
    alone_ns = sum(moment.time_ns for moment in moments if joint.nodes[moment.node].kind is Kind.ALONE)
    return Prediction(tuple(moments), time_ns, alone_ns, sum(joint.nodes[number].size_bytes for number in kept), again)
