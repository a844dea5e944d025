"""A population of keep-sets that are crossed, changed and selected.

Starts from the strategies' keep-sets. A child takes the ops before a random place from one parent and the rest from the
other, or each op from either; parents win a tournament of two. Children replace the worst. Tries are counted, so that a
seed gives one answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from remat.core.problem import Problem
from remat.core.schedule import Schedule, plain_schedule
from remat.solvers.base import Strategy
from remat.solvers.strategies.keep_search import Choice, KeepSetSearch


@final
@dataclass(frozen=True, slots=True)
class Genetic(Strategy):
    name: str = "genetic"
    population: int = 16
    every: int = 20
    """Rounds between looks at the clock."""

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        search, rng = KeepSetSearch(problem), random.Random(seed)
        people: list[Choice] = [search.best]
        for start in search.starts():
            people.append(start)
            yield search.schedule(search.best)
        people = sorted(dict.fromkeys(people), key=search.weigh)[: self.population]
        for number in range(search.rounds if search.ops else 0):
            if search.left <= 0:
                break
            child = search.flip(_cross(search, _pick(search, people, rng), _pick(search, people, rng), rng), rng)
            if child not in people and (
                len(people) < self.population or search.weigh(child) < search.weigh(people[-1])
            ):
                people = sorted([*people, child], key=search.weigh)[: self.population]
            if number % self.every == 0:
                yield search.schedule(search.best)
        yield search.schedule(search.best)


def _pick(search: KeepSetSearch, people: list[Choice], rng: random.Random) -> Choice:
    return min(rng.choice(people), rng.choice(people), key=search.weigh)


def _cross(search: KeepSetSearch, mother: Choice, father: Choice, rng: random.Random) -> Choice:
    place = rng.randrange(search.activations.turn + 1)
    if rng.random() < 0.5:
        return frozenset({op for op in mother if op < place} | {op for op in father if op >= place})
    return frozenset(op for op in search.ops if op in (mother if rng.random() < 0.5 else father))
