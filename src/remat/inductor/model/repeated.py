"""Steps that call a graph more than once: it runs under one choice in all its calls.

In: the composed step, which graph each call is of, and a budget. Out: a choice for the whole, or None where not even
the leanest of every graph fit together. Every graph is given the same share of the way from the least that it needs to
the most, as large as fits; what is left then goes to single graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from remat.errors import InfeasibleBudget
from remat.inductor.model.choose import Choice, given, leanest
from remat.inductor.model.compose import Composed
from remat.inductor.model.joint import Joint
from remat.inductor.model.program import MeasuredRates

ROUNDS = 4
"""The share is found to a part in two to this power."""
BOUNDLESS = 2**62

Choose: TypeAlias = Callable[[Joint, MeasuredRates, int], Choice]


def choose_repeated(
    whole: Composed,
    calls: Sequence[int],
    graphs: Sequence[tuple[Joint, MeasuredRates]],
    budget_bytes: int,
    choose: Choose,
) -> Choice | None:
    """See the module's docstring. `calls` name graphs by any number, `graphs` has one for each call."""
    named = {name: _Graph(*graph, choose) for name, graph in zip(calls, graphs, strict=True)}
    step = _Step(whole, calls, named, budget_bytes)
    if not step.take(dict.fromkeys(named, 0.0)):
        return None
    if not step.take(dict.fromkeys(named, 1.0)):
        fits, beyond = 0.0, 1.0
        for _ in range(ROUNDS):
            share = (fits + beyond) / 2
            fits, beyond = (share, beyond) if step.take(dict.fromkeys(named, share)) else (fits, share)
        for name, graph in named.items():
            for share in sorted(graph.known):
                step.take({**step.shares, name: share})
    return step.best


def solved(calls: Sequence[int]) -> int:
    """How often solvers are asked at most."""
    return len(set(calls)) * (ROUNDS + 1)


@dataclass(slots=True)
class _Graph:
    """One that is called, and what to save of it, by the share of its way that it may take."""

    joint: Joint
    rates: MeasuredRates
    choose: Choose
    known: dict[float, frozenset[int]] = field(default_factory=dict)
    _ends: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        least, most = leanest(self.joint, self.rates, may_copy=False), self.choose(self.joint, self.rates, BOUNDLESS)
        self.known.update({0.0: least.saved, 1.0: most.saved})
        self._ends = least.prediction.peak_bytes, most.prediction.peak_bytes

    def at(self, share: float) -> frozenset[int]:
        if share not in self.known:
            leaner = self.known[max(other for other in self.known if other < share)]
            least, most = self._ends
            with suppress(InfeasibleBudget):
                leaner = self.choose(self.joint, self.rates, least + int(share * (most - least))).saved
            self.known[share] = leaner
        return self.known[share]


@dataclass(slots=True)
class _Step:
    whole: Composed
    calls: Sequence[int]
    named: Mapping[int, _Graph]
    budget_bytes: int
    best: Choice | None = None
    shares: Mapping[int, float] = field(default_factory=dict)
    """Of the best."""

    def take(self, shares: Mapping[int, float]) -> bool:
        """Whether that fits; the best that does is kept."""
        saved: set[int] = set()
        for places, name in zip(self.whole.places, self.calls, strict=True):
            saved.update(places[number] for number in self.named[name].at(shares[name]))
        choice = given(self.whole.joint, self.whole.rates, frozenset(saved))
        fits = choice.prediction.peak_bytes <= self.budget_bytes
        if fits and (self.best is None or choice.prediction.time_ns < self.best.prediction.time_ns):
            self.best, self.shares = choice, shares
        return fits
