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
from remat.solvers.keep_search import Choice, Field


@final
@dataclass(frozen=True, slots=True)
class Genetic(Strategy):
    name: str = "genetic"
    population: int = 16
    every: int = 20
    """Rounds between looks at the clock."""

    def schedules(self, problem: Problem, seed: int) -> Iterator[Schedule]:
        yield plain_schedule(problem.graph)
        field, rng = Field(problem), random.Random(seed)
        people: list[Choice] = [field.best]
        for start in field.starts():
            people.append(start)
            yield field.schedule(field.best)
        people = sorted(dict.fromkeys(people), key=field.weigh)[: self.population]
        for number in range(field.rounds if field.ops else 0):
            if field.left <= 0:
                break
            child = field.flip(_cross(field, _pick(field, people, rng), _pick(field, people, rng), rng), rng)
            if child not in people and (len(people) < self.population or field.weigh(child) < field.weigh(people[-1])):
                people = sorted([*people, child], key=field.weigh)[: self.population]
            if number % self.every == 0:
                yield field.schedule(field.best)
        yield field.schedule(field.best)


def _pick(field: Field, people: list[Choice], rng: random.Random) -> Choice:
    return min(rng.choice(people), rng.choice(people), key=field.weigh)


def _cross(field: Field, mother: Choice, father: Choice, rng: random.Random) -> Choice:
    place = rng.randrange(field.activations.turn + 1)
    if rng.random() < 0.5:
        return frozenset({op for op in mother if op < place} | {op for op in father if op >= place})
    return frozenset(op for op in field.ops if op in (mother if rng.random() < 0.5 else father))
