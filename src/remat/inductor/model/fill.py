"""Save more of what a choice makes again, while memory is left.

In: a joint graph, what kernels cost, a choice that fits. Out: what to save. The solvers price each op by itself, and a
fused op has no price of its own: what it costs to run again depends on which kernel it ends up in. Here only the
prediction is asked. A model repeats itself, so the same value of all its blocks is one candidate; the one that saves
the most time for its memory comes first, and of the last as many blocks as fit. Predictions take long, so candidates
are looked at in the order of a guess: what the ops that need not run again would take by themselves.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass

from remat.inductor.model.contract import contract
from remat.inductor.model.joint import Half, Joint, Kind
from remat.inductor.model.predict import Prediction, predict
from remat.inductor.model.program import MeasuredRates, computed_bytes
from remat.inductor.model.split import pruned

MOST_TRIALS = 50
"""Predictions that are made."""
ALMOST = 0.7
"""Of what the next candidate was worth when it was last looked at: a candidate that is worth less waits."""
LEAST_BYTES = 1 << 20
"""What any candidate is taken to need: statistics of rows are not worth being first."""

_NUMBER = re.compile(r"\d+")
Saved = frozenset[int]


def fill(joint: Joint, rates: MeasuredRates, saved: Saved, budget_bytes: int) -> Saved:
    """`saved` and more, within `budget_bytes`; the same where nothing more is of use or `saved` does not fit."""
    filling = _Filling(joint, rates, saved, budget_bytes)
    while filling.improve():
        needed = pruned(joint, filling.saved)
        if needed != filling.saved:
            filling.take(needed, predict(joint, needed, rates))
    return filling.saved


@dataclass(frozen=True, slots=True)
class _Step:
    """What saving as much as fits of one candidate leads to."""

    saved: Saved
    prediction: Prediction
    worth: float
    """Time for memory."""


class _Filling:
    def __init__(self, joint: Joint, rates: MeasuredRates, saved: Saved, budget_bytes: int) -> None:
        self.joint, self.rates, self.budget_bytes = joint, rates, budget_bytes
        self._candidates = list(_candidates(joint, rates))
        self._trials = MOST_TRIALS
        self._alone_ns = [_alone_ns(joint, rates, number) for number in range(len(joint.nodes))]
        self._wanted = _wanted(joint)
        self.take(saved, predict(joint, saved, rates))

    def take(self, saved: Saved, prediction: Prediction) -> None:
        self.saved, self.prediction = saved, prediction
        self._again: dict[int, int] = {}
        """For each node that backward runs, the most bytes in memory until then, from when it runs in the forward."""
        forward = [moment for moment in prediction.moments if not moment.in_backward]
        most, since = 0, {}
        for moment in reversed(forward):
            most = since[moment.node] = max(most, moment.live_bytes)
        most = 0
        for moment in prediction.moments[len(forward) :]:
            most = max(most, moment.live_bytes)
            self._again[moment.node] = max(most, since.get(moment.node, 0))

    def improve(self) -> bool:
        """Go through the candidates; whether one was taken.

        What one is worth is looked at again when it is its turn: what was taken since may have changed it.
        """
        known: dict[int, _Step] = {}
        """What candidates lead to from what is saved now."""
        is_better = False
        now = self._runs_again_ns(self.saved)
        queue = [(-guess, number) for number in range(len(self._candidates)) if (guess := self._guess(number, now)) > 0]
        heapq.heapify(queue)
        while queue:
            _, number = heapq.heappop(queue)
            step = known.pop(number, None) or self._step(number)
            if step is None:
                continue
            if queue and step.worth < ALMOST * -queue[0][0]:
                known[number] = step
                heapq.heappush(queue, (-step.worth, number))
            else:
                self.take(step.saved, step.prediction)
                known.clear()
                is_better = True
        return is_better

    def _rest(self, number: int) -> tuple[list[Saved], int]:
        """What a candidate would save that runs again now, in order, and how much of it memory is left for."""
        rest = [(maker, results) for maker, results in self._candidates[number] if maker in self._again]
        if not rest:
            return [], 0
        maker, results = rest[-1]
        left = self.budget_bytes - self._again[maker]
        count = min(len(rest), left // max(1, sum(self.joint.nodes[item].size_bytes for item in results)))
        return [results for _, results in rest], count

    def _guess(self, number: int, now: float) -> float:
        """What a candidate is worth if ops that are fused take what they would take alone."""
        rest, count = self._rest(number)
        if count <= 0:
            return 0.0
        more = frozenset().union(*rest[-count:])
        size = sum(self.joint.nodes[item].size_bytes for item in more)
        return (now - self._runs_again_ns(self.saved | more)) / max(size, LEAST_BYTES)

    def _runs_again_ns(self, saved: Saved) -> float:
        """What backward runs again, op by op."""
        nodes, total = self.joint.nodes, 0.0
        seen = set(self._wanted)
        waiting = list(self._wanted)
        while waiting:
            number = waiting.pop()
            if number not in saved:
                total += self._alone_ns[number]
                for read in nodes[number].reads:
                    if read not in seen:
                        seen.add(read)
                        waiting.append(read)
        return total

    def _step(self, number: int) -> _Step | None:
        """None where it saves no time, does not fit, or enough was tried."""
        rest, count = self._rest(number)
        while count > 0 and self._trials:
            self._trials -= 1
            saved = self.saved.union(*rest[-count:])
            found = predict(self.joint, saved, self.rates)
            gained = self.prediction.time_ns - found.time_ns
            if gained <= 0:
                return None
            if found.peak_bytes <= self.budget_bytes:
                return _Step(saved, found, gained / max(found.peak_bytes - self.prediction.peak_bytes, LEAST_BYTES))
            count //= 2
        return None


def _wanted(joint: Joint) -> Saved:
    """What backward reads of the forward, and what it returns."""
    nodes = joint.nodes
    read = {item for node in nodes if node.phase is Half.BACKWARD for item in node.reads}
    return frozenset(item for item in read | joint.gradients if nodes[item].phase is not Half.BACKWARD)


def _alone_ns(joint: Joint, rates: MeasuredRates, number: int) -> float:
    """What a node takes in a kernel of its own; views and inputs are free."""
    node = joint.nodes[number]
    if node.kind is Kind.ALONE:
        return rates.alone_ns.get(number, 0.0)
    if node.kind in (Kind.VIEW, Kind.INPUT) or node.is_part:
        return 0.0
    read = sum(joint.nodes[owner].size_bytes for owner in joint.owners[number])
    return (node.size_bytes + read + computed_bytes(joint, number, rates)) / rates.bytes_per_ns


def _candidates(joint: Joint, rates: MeasuredRates) -> Iterator[list[tuple[int, Saved]]]:
    """For each op of the forward that can run again, it and its results in every block that has such an op."""
    nodes = joint.nodes
    made: dict[int, set[int]] = {}
    for number in contract(joint, rates).node_of:
        maker = joint.maker(number)
        if nodes[number].phase is not Half.BACKWARD and number not in joint.kept and nodes[maker].recomputable:
            made.setdefault(maker, set()).add(number)
    alike: dict[tuple[str, str, int], list[tuple[int, Saved]]] = {}
    for maker, results in made.items():
        size = sum(nodes[number].size_bytes for number in results)
        key = nodes[maker].target, _NUMBER.sub("#", nodes[maker].module), size
        alike.setdefault(key, []).append((maker, frozenset(results)))
    yield from alike.values()
