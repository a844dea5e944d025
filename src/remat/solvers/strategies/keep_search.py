"""What local searches over keep-sets share: where they start, how good a choice is, and how long they may try.

In: a problem. Out: a `KeepSetSearch`, which weighs sets of forward ops whose results are dropped at the turn to
backward. Energy is the share of recomputation, plus a penalty for each share of the budget that the peak is over, so
that a search can pass through choices that do not fit.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from remat.core.problem import Problem
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.solvers.schedule.activations import Activations, activations_of
from remat.solvers.strategies.benefit_cost import seconds_per_byte
from remat.solvers.strategies.keep_sets import keep_sets
from remat.solvers.strategies.mu_two import pick_order

OVER_BUDGET_PENALTY = 10.0
SIMULATED_OPS = 250_000
"""Ops to simulate in all: a few seconds."""
MOST_TRIES = 500
HALVINGS = 7
"""Tries to find how much of a greedy order is enough."""

Choice = frozenset[int]


class KeepSetSearch:
    """Counts what it weighs: `left` tries remain, and a choice that was weighed before costs none."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.activations: Activations = activations_of(problem)
        self.left = min(MOST_TRIES, SIMULATED_OPS // (len(problem.graph.ops) + 1))
        self.rounds = 4 * self.left
        self._energy: dict[Choice, float] = {}
        self._fits: set[Choice] = set()
        self.ops = sorted((*self.activations.ops, *self.activations.sources))
        self.best: Choice = frozenset(self.activations.sources)
        self.weigh(self.best)

    def weigh(self, dropped: Choice) -> float:
        if dropped not in self._energy:
            self.left -= 1
            timeline = simulate(self.problem, self.schedule(dropped))
            extra = timeline.time_ns - self.problem.base_time_ns
            over = max(0, timeline.peak_bytes - self.problem.budget_bytes) / max(self.problem.budget_bytes, 1)
            if not over:
                self._fits.add(dropped)
            self._energy[dropped] = extra / (self.problem.base_time_ns or 1.0) + OVER_BUDGET_PENALTY * over
            if self._energy[dropped] < self._energy.get(self.best, float("inf")):
                self.best = dropped
        return self._energy[dropped]

    def schedule(self, dropped: Choice) -> Schedule:
        return self.activations.schedule(dropped)

    def starts(self) -> Iterator[Choice]:
        """What the strategies drop, and of what the greedy ones would drop as little as fits; each is weighed."""
        ops, outputs = self.activations.ops, self.activations.flat.outputs
        for _, kept in keep_sets(self.problem):
            yield self._weighed(op for op in ops if not kept.issuperset(outputs[op]))
        by_rate = sorted(ops, key=lambda op: seconds_per_byte(self.activations, op))
        for order in (pick_order(self.activations), by_rate):
            short, enough = 0, len(order)
            for _ in range(HALVINGS):
                middle = (short + enough) // 2
                dropped = self._weighed(order[:middle])
                yield dropped
                short, enough = (short, middle) if dropped in self._fits else (middle, enough)

    def _weighed(self, dropped: Iterable[int]) -> Choice:
        choice = frozenset(dropped).union(self.activations.sources)
        self.weigh(choice)
        return choice

    def flip(self, dropped: Choice, rng: random.Random) -> Choice:
        """Change one op, or a few in a row."""
        start, width = rng.randrange(len(self.ops)), rng.choice((1, 1, 2, 4))
        return dropped.symmetric_difference(self.ops[start : start + width])
