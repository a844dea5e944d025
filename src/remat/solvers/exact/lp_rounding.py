"""The linear relaxation of Checkmate, rounded (its two-phase approximation).

In: a problem. Out: the fastest schedule that fits among roundings of the relaxation's S, each completed with the
least that has to run again, as it is and made to fit. S is rounded at a sweep of thresholds and at random, with S as
the odds. The relaxation's value is a bound for every schedule.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from remat.core.search.limits import Limits
from remat.solvers.backends.highs import solve_with_highs
from remat.solvers.backends.program import EXACT_GAP
from remat.solvers.exact.checkmate import Checkmate, safe_extra_time
from remat.solvers.exact.exact_solver import ExactSolver, offer_if_it_fits, start_quickly
from remat.solvers.exact.milp import MAX_CHOICES
from remat.solvers.exact.stages import make_stages, to_schedule
from remat.solvers.schedule.editable import flatten
from remat.solvers.search.incumbent import ScheduleIncumbent
from remat.solvers.search.start import repair

RELAXED_SHARE = 0.7
"""Of the time left, for the relaxation; the rest is for rounding."""


@final
@dataclass(frozen=True, slots=True)
class LpRounding(ExactSolver):
    name: str = "lp_rounding"
    thresholds: tuple[float, ...] = tuple(step / 20 for step in range(1, 20))
    draws: int = 20

    def search(self, incumbent: ScheduleIncumbent) -> str:
        reason = self._round(incumbent) if incumbent.left_s() > 0 else "Out of time."
        if incumbent.best is None and incumbent.is_possible:
            start_quickly(incumbent)
            reason += " This is a quick strategy's schedule."
        return reason

    def _round(self, incumbent: ScheduleIncumbent) -> str:
        problem, flat, seed = incumbent.problem, flatten(incumbent.problem), incumbent.limits.seed
        stages = make_stages(flat, most=MAX_CHOICES)
        if stages is None:
            return f"A program with more than {MAX_CHOICES} choices is not tried."
        model = Checkmate(flat, problem.budget_bytes, stages)
        limits = Limits(incumbent.left_s() * RELAXED_SHARE, gap=EXACT_GAP, seed=seed % 2**31)
        answer = solve_with_highs(model.program, limits, relaxed=True)
        incumbent.raise_bound(safe_extra_time(model, answer.bound), "relaxation")
        if answer.point is None or not incumbent.is_possible:
            return "The relaxation was not solved in time."
        pinned = {value for value, producer in enumerate(flat.producer) if not flat.recomputable[producer]}
        for held in self._roundings(model, answer.point, seed):
            schedule = to_schedule(flat, stages, [held_here | pinned for held_here in held])
            if schedule is not None and not offer_if_it_fits(incumbent, schedule, "rounding"):
                repaired = repair(problem, schedule, incumbent.limits.within(incumbent.left_s()))
                offer_if_it_fits(incumbent, repaired, "repair")
            if incumbent.is_closed or incumbent.left_s() <= 0:
                break
        return "Proven optimal." if incumbent.is_closed else "The best of the roundings."

    def _roundings(self, model: Checkmate, point: Sequence[float], seed: int) -> Iterator[list[frozenset[int]]]:
        for threshold in self.thresholds:
            yield model.held_at(point, threshold)
        rng = random.Random(seed)
        for _ in range(self.draws):
            drawn = [float(rng.random() < share) for share in point]
            yield model.held_at(drawn)
