"""The linear relaxation of Checkmate, rounded (its two-phase approximation).

In: a problem. Out: the fastest schedule that fits among roundings of the relaxation's S, each completed with the
least that has to run again, as it is and made to fit. S is rounded at a sweep of thresholds and at random, with S as
the odds. The relaxation's value is a bound for every schedule.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from remat.solvers.backends.highs import solve_with_highs
from remat.solvers.checkmate import Checkmate, safe_time
from remat.solvers.exact import Exact, ExactSolver
from remat.solvers.milp import MAX_CHOICES
from remat.solvers.program import Limits
from remat.solvers.stages import make_stages, to_schedule
from remat.solvers.start import repair
from remat.solvers.tape import shape_of

RELAXED_SHARE = 0.7
"""Of the time left, for the relaxation; the rest is for rounding."""


@final
@dataclass(frozen=True, slots=True)
class LpRounding(ExactSolver):
    name: str = "lp_rounding"
    thresholds: tuple[float, ...] = tuple(step / 20 for step in range(1, 20))
    draws: int = 20
    clock: Callable[[], float] = time.monotonic

    def search(self, found: Exact, seed: int) -> str:
        reason = self._round(found, seed) if found.left_s() > 0 else "Out of time."
        if found.best is None and found.is_possible:
            found.start_quickly(seed)
            reason += " This is a quick strategy's schedule."
        return reason

    def _round(self, found: Exact, seed: int) -> str:
        problem, shape = found.problem, shape_of(found.problem)
        stages = make_stages(shape, most=MAX_CHOICES)
        if stages is None:
            return f"A program with more than {MAX_CHOICES} choices is not tried."
        model = Checkmate(shape, problem.budget_bytes, stages)
        limits = Limits(found.left_s() * RELAXED_SHARE, seed=seed % 2**31)
        answer = solve_with_highs(model.program, limits, relaxed=True)
        found.raise_bound(safe_time(problem, model, answer.bound), "relaxation")
        if answer.point is None or not found.is_possible:
            return "The relaxation was not solved in time."
        pinned = {value for value, producer in enumerate(shape.producer) if not shape.recomputable[producer]}
        for held in self._roundings(model, answer.point, seed):
            schedule = to_schedule(shape, stages, [held_here | pinned for held_here in held])
            if schedule is not None and not found.offer(schedule, "rounding"):
                found.offer(repair(problem, schedule, time_limit_s=found.left_s(), clock=self.clock), "repair")
            if found.is_closed or found.left_s() <= 0:
                break
        return "Proven optimal." if found.is_closed else "The best of the roundings."

    def _roundings(self, model: Checkmate, point: Sequence[float], seed: int) -> Iterator[list[frozenset[int]]]:
        for threshold in self.thresholds:
            yield model.held_at(point, threshold)
        rng = random.Random(seed)
        for _ in range(self.draws):
            drawn = [float(rng.random() < share) for share in point]
            yield model.held_at(drawn)
