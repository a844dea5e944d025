"""Steps that call a graph more than once: it runs under one choice in all its calls.

In: the composed step, which graph each call is of, and a budget. Out: a choice for the whole; the leanest that is known
where nothing fits. What all calls save is in memory together, and what one backward makes again only while that runs:
so a graph is asked for the fastest choice that saves no more than a share of what it saves at most, with as much room
to work in as any graph needs. Every graph is given the same share, as large as fits; what is left then goes to single
graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from remat.errors import InfeasibleBudget
from remat.inductor.model.choose import Choice, given, leanest
from remat.inductor.model.compose import Composed
from remat.inductor.model.joint import Joint
from remat.inductor.model.policies import must_save
from remat.inductor.model.predict import predict
from remat.inductor.model.program import MeasuredRates
from remat.inductor.model.split import pruned

ROUNDS = 4
"""The share is found to a part in two to this power."""
BOUNDLESS = 2**62


class Choose(Protocol):
    def __call__(
        self, joint: Joint, rates: MeasuredRates, budget_bytes: int, *, saved_bytes: int | None = None
    ) -> Choice: ...


def choose_repeated(
    whole: Composed,
    calls: Sequence[int],
    graphs: Sequence[tuple[Joint, MeasuredRates]],
    budget_bytes: int,
    choose: Choose,
) -> Choice:
    """See the module's docstring. `calls` name graphs by any number, `graphs` has one for each call."""
    named = {name: _Graph(*graph, choose) for name, graph in zip(calls, graphs, strict=True)}
    step = _Step(whole, calls, named, budget_bytes)
    saved = step.leanest()
    lean = step.under(saved)
    if lean.prediction.peak_bytes > budget_bytes:
        return lean
    step.begin(saved)
    step.take(dict.fromkeys(named, 0.0))
    if not step.take(dict.fromkeys(named, 1.0)):
        fits, beyond = 0.0, 1.0
        for _ in range(ROUNDS):
            share = (fits + beyond) / 2
            fits, beyond = (share, beyond) if step.take(dict.fromkeys(named, share)) else (fits, share)
        for name, graph in named.items():
            for share in sorted(graph.known):
                step.take({**step.shares, name: share})
    return step.best or lean


def solved(calls: Sequence[int]) -> int:
    """How often solvers are asked at most."""
    return len(set(calls)) * (ROUNDS + 1)


@dataclass(slots=True)
class _Graph:
    """One that is called, and what to save of it, by the share of its way that it may take."""

    joint: Joint
    rates: MeasuredRates
    choose: Choose
    room_bytes: int = 0
    """To work in, beside what is saved."""
    known: dict[float, frozenset[int]] = field(default_factory=dict)
    _ends: tuple[int, int] = (0, 0)
    """What is saved at the least and at most."""

    def lean(self) -> tuple[frozenset[int], frozenset[int]]:
        """What has the smallest peak if it is called once, and what saves nothing that can be made again."""
        nothing = pruned(self.joint, must_save(self.joint) | self.joint.kept)
        return leanest(self.joint, self.rates, may_copy=False).saved, nothing

    def begin(self, least: frozenset[int], room_bytes: int) -> None:
        most = self.choose(self.joint, self.rates, BOUNDLESS).saved
        self.known, self.room_bytes = {0.0: least, 1.0: most}, room_bytes
        self._ends = self._saved_bytes(least), self._saved_bytes(most)

    def at(self, share: float) -> frozenset[int]:
        if share not in self.known:
            leaner = self.known[max(other for other in self.known if other < share)]
            least, most = self._ends
            saved = least + int(share * (most - least))
            with suppress(InfeasibleBudget):
                leaner = self.choose(self.joint, self.rates, saved + self.room_bytes, saved_bytes=saved).saved
            self.known[share] = leaner
        return self.known[share]

    def room_for(self, saved: frozenset[int]) -> int:
        """What it takes at its peak beside what is saved."""
        found = predict(self.joint, saved, self.rates)
        return found.peak_bytes - found.saved_bytes

    def _saved_bytes(self, saved: frozenset[int]) -> int:
        return predict(self.joint, saved, self.rates).saved_bytes


@dataclass(slots=True)
class _Step:
    whole: Composed
    calls: Sequence[int]
    named: Mapping[int, _Graph]
    budget_bytes: int
    best: Choice | None = None
    shares: Mapping[int, float] = field(default_factory=dict)
    """Of the best."""

    def leanest(self) -> dict[int, frozenset[int]]:
        """Of every graph, the one or the other of what may be leanest, as the whole is."""
        ways = {name: graph.lean() for name, graph in self.named.items()}
        saved = {name: first for name, (first, _) in ways.items()}
        peak = self._peak_bytes(saved)
        for name in sorted(ways, key=lambda name: -self.calls.count(name)):
            other = {**saved, name: ways[name][1]}
            if (found := self._peak_bytes(other)) < peak:
                saved, peak = other, found
        return saved

    def begin(self, saved: Mapping[int, frozenset[int]]) -> None:
        """Solvers are asked from here on, for more than that."""
        room = max(graph.room_for(saved[name]) for name, graph in self.named.items())
        for name, graph in self.named.items():
            graph.begin(saved[name], room)

    def take(self, shares: Mapping[int, float]) -> bool:
        """Whether that fits; the best that does is kept."""
        choice = self.under({name: graph.at(shares[name]) for name, graph in self.named.items()})
        fits = choice.prediction.peak_bytes <= self.budget_bytes
        if fits and (self.best is None or choice.prediction.time_ns < self.best.prediction.time_ns):
            self.best, self.shares = choice, shares
        return fits

    def under(self, saved: Mapping[int, frozenset[int]]) -> Choice:
        return given(self.whole.joint, self.whole.rates, self._placed(saved))

    def _peak_bytes(self, saved: Mapping[int, frozenset[int]]) -> int:
        return predict(self.whole.joint, self._placed(saved), self.whole.rates).peak_bytes

    def _placed(self, saved: Mapping[int, frozenset[int]]) -> frozenset[int]:
        """What every call saves, by the numbers of the whole."""
        places = zip(self.whole.places, self.calls, strict=True)
        return frozenset(places_of[number] for places_of, name in places for number in saved[name])
