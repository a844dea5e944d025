"""A compiled step, some of whose saved tensors spend a while on the host, where that is faster than without.

In: a graph, what it may need, and what is known without copies. Out: code that fits, or None. As much as the link can
move out while forward runs, and back while backward does, may be away when backward begins: the solver is asked for a
choice with that much more memory, and what its forward saves first travels (`travel.py`). The code is gone through
before it runs; where it needs more than it may, the choice is made for less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from remat.core.copies import OffloadPlace
from remat.errors import InfeasibleBudget
from remat.inductor.graph import CompiledGraph, Decided, Needs, Ready
from remat.inductor.model.choose import Choice, leanest
from remat.inductor.model.joint import Joint
from remat.inductor.model.predict import Prediction
from remat.inductor.model.program import MeasuredRates
from remat.inductor.travel import IN_TIME, NodeTimes, Travel

ROUNDS = 3
"""How often code that needs more than it may is made again for less."""
LEAST_CORRECTION = 0.01
"""Of what a step may need: by at least this much a choice is made for less."""
ON_THE_WAY = 1.1
"""Of what has to be away when backward begins: so much travels."""
PATIENCE = (1, 2, 4)
"""Where nothing fits without copies: by how much more may be away than can be moved while ops run."""
WORTH_IT = 0.02
"""Of a step's predicted time: what copies are foreseen to save less than is not worth compiling two or three times;
predictions are hardly better than that."""


@dataclass(frozen=True, slots=True)
class OffloadRequest:
    """What a step may need, what it is planned for, and who chooses and looks at code."""

    allowed_bytes: int
    goal_bytes: int
    choose: Callable[[Joint, MeasuredRates, int], Choice]
    needs: Callable[[Ready], Needs]


def compile_with_copies(
    graph: CompiledGraph, inputs: Sequence[Any], place: OffloadPlace, asked: OffloadRequest, foreseen: Choice | None
) -> tuple[Ready, Needs] | None:
    """Code that is predicted to be faster than what is `foreseen` without copies, and fits.

    Where nothing fits without, ops may wait for copies, and it is as fast as it can be.
    """
    if foreseen is not None:
        most = most_away(foreseen.prediction, place)
        return _compile_within(graph, inputs, place, asked, most, foreseen.prediction.time_ns)
    most = most_away(leanest(graph.known.joint, graph.known.rates, may_copy=False).prediction, place)
    tried = (_compile_within(graph, inputs, place, asked, share * most, math.inf) for share in PATIENCE)
    return next((found for found in tried if found is not None), None)


def _compile_within(
    graph: CompiledGraph,
    inputs: Sequence[Any],
    place: OffloadPlace,
    asked: OffloadRequest,
    most: int,
    known_ns: float,
) -> tuple[Ready, Needs] | None:
    """With at most so many bytes away, and in less time than is known."""
    known, extra = graph.known, 0
    goal = asked.goal_bytes + most
    for round in range(ROUNDS):
        choice = None
        with suppress(InfeasibleBudget):
            choice = asked.choose(known.joint, known.rates, goal)
        if choice is None or choice.prediction.time_ns >= (1 - WORTH_IT) * known_ns:
            return None
        # No more than it takes: what is on its way out or back is in memory, too.
        wanted = int(ON_THE_WAY * (choice.prediction.peak_bytes - asked.goal_bytes)) + extra
        travel = Travel(place, max(0, min(most, wanted)), node_times(known.joint, choice))
        made = graph.compile(inputs, _deciding(choice), travel)
        assert isinstance(made, Ready), "a choice leads to code"
        needs = asked.needs(made)
        if needs.fit(asked.allowed_bytes):
            return (made, needs) if made.built.away_bytes else None
        excess = needs.first_bytes - asked.allowed_bytes
        extra += excess
        if wanted + excess > most:
            goal -= max(excess * (1 + round), int(LEAST_CORRECTION * asked.allowed_bytes))
    return None


def _deciding(choice: Choice) -> Callable[[object, MeasuredRates], Decided]:
    return lambda uncut, rates: Decided(choice)


def most_away(prediction: Prediction, place: OffloadPlace) -> int:
    """Bytes that can leave while forward runs and come back while backward does."""
    forward = sum(moment.time_ns for moment in prediction.moments if not moment.in_backward)
    link = place.link
    moved = min(link.out_bytes_per_ns * forward, link.back_bytes_per_ns * (prediction.time_ns - forward)) / IN_TIME
    return min(int(moved), place.budget_bytes)


def node_times(joint: Joint, choice: Choice) -> NodeTimes:
    """About how long each node takes in either half."""
    nodes = joint.nodes if choice.unrolled is None else choice.unrolled.joint.nodes
    halves: tuple[dict[str, float], dict[str, float]] = {}, {}
    for moment in choice.prediction.moments:
        halves[moment.in_backward][nodes[moment.node].name] = moment.time_ns
    return NodeTimes(*halves)
