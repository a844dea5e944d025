"""Plans for the stages of one rank under its budget.

Every micro-batch of a stage runs the same plan, so what it saves counts as often as micro-batches wait in the stage,
and what it needs while it runs counts once. How much it may save is what is searched for: with more, less is computed
again; with less, there is more room to compute in. Stages of one rank share the budget in proportion to what they
would save without any plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remat.core.budget import format_bytes
from remat.core.schedule import Schedule
from remat.core.solution import Solution, Status
from remat.distributed.pipelines.actions import Action, in_flight
from remat.distributed.pipelines.early import computed_early
from remat.distributed.pipelines.rank_memory import RankHolds, StageNeeds, around, peak_bytes
from remat.distributed.pipelines.stage_problem import StageLimits, StageProblem
from remat.errors import InfeasibleBudget

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of what stages would save without a plan, those that are tried first."""
REFINEMENTS = 2
"""How often the neighbourhood of the best is looked at, in half the steps each time."""


@dataclass(frozen=True, slots=True)
class RankProblem:
    """All that plans of one rank depend on."""

    stages: Mapping[int, StageProblem]
    order: tuple[Action, ...]
    holds: RankHolds
    budget_bytes: int
    waits_ns: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """For each stage, how long it waits for each of its gradients anyway: then it computes again for nothing."""

    def peak_bytes(self, needs: Mapping[int, StageNeeds]) -> int:
        return peak_bytes(self.order, needs, self.holds)

    def time_ns(self, needs: Mapping[int, StageNeeds]) -> float:
        """What a step takes in all stages of the rank, without what is computed while it waits."""
        micros = len({action.micro for action in self.order})
        busy = micros * sum(item.forward_ns + item.backward_ns for item in needs.values())
        hidden = (min(wait, needs[stage].early_ns) for stage, waits in self.waits_ns.items() for wait in waits)
        return busy - sum(hidden)


@dataclass(frozen=True, slots=True)
class StageChoice:
    solution: Solution
    needs: StageNeeds

    @property
    def schedule(self) -> Schedule:
        assert self.solution.schedule is not None, "what was chosen runs"
        return self.solution.schedule


Choices = Mapping[int, StageChoice]


def choose(rank: RankProblem, *, solver: str, time_limit_s: float, seed: int) -> Choices:
    """The fastest plans that are found for all stages of the rank together; raises `InfeasibleBudget`."""
    plain = without_plan(rank)
    if rank.peak_bytes(needs_of(plain)) <= rank.budget_bytes:
        return plain
    tries = len(SHARES) + 2 * REFINEMENTS
    search = _Search(rank, plain, solver, time_limit_s / (tries * len(rank.stages)), seed)
    found = {share: search.at(share) for share in SHARES}
    step = SHARES[1] - SHARES[0]
    for _ in range(REFINEMENTS):
        best, step = min(found, key=lambda share: _time_ns(rank, found[share])), step / 2
        for share in (best - step, best + step):
            if 0 <= share <= 1 and share not in found:
                found[share] = search.at(share)
    best = min(found, key=lambda share: _time_ns(rank, found[share]))
    chosen = found[best]
    if chosen is None:
        raise search.refusal()
    return chosen


def without_plan(rank: RankProblem) -> Choices:
    """Every op once."""
    return {number: _given(stage, stage.plain()) for number, stage in rank.stages.items()}


def needs_of(choices: Choices) -> dict[int, StageNeeds]:
    return {number: choice.needs for number, choice in choices.items()}


def fill_waits(rank: RankProblem, choices: Choices) -> Choices:
    """The same plans with as much as fits computed again before gradients come, in stages that wait for them."""
    made = dict(choices)
    for number in (number for number, waits in rank.waits_ns.items() if max(waits, default=0.0) > 0):
        stage, choice = rank.stages[number], made[number]
        _, beside = around(rank.order, needs_of(made), rank.holds, number)
        limit = rank.budget_bytes - beside + stage.received_bytes
        schedule = computed_early(stage.problem(), choice.schedule, stage.captured, limit)
        made[number] = StageChoice(replace(choice.solution, schedule=schedule), stage.needs(schedule))
    return made


def _given(stage: StageProblem, schedule: Schedule) -> StageChoice:
    time = stage.problem().base_time_ns
    return StageChoice(Solution(Status.OPTIMAL, schedule, time, 0, time, 0, "none"), stage.needs(schedule))


def _time_ns(rank: RankProblem, choices: Choices | None) -> float:
    return math.inf if choices is None else rank.time_ns(needs_of(choices))


class _Search:
    def __init__(self, rank: RankProblem, plain: Choices, solver: str, time_limit_s: float, seed: int) -> None:
        self._rank, self._solver, self._limit_s, self._seed = rank, solver, time_limit_s, seed
        self._plain = needs_of(plain)
        self._least = {
            number: min(self._plain[number].saved_bytes, stage.least_saved_bytes("auto", time_limit_s))
            for number, stage in rank.stages.items()
        }
        self._lacking: dict[float, int] = {}
        """For each share that was tried in vain, the bytes that were missing."""

    def at(self, share: float) -> Choices | None:
        """Plans where each stage saves no more than this share of what it can; None where nothing fits."""
        saved = {
            number: self._least[number] + int(share * (needs.saved_bytes - self._least[number]))
            for number, needs in self._plain.items()
        }
        kept = {number: replace(needs, saved_bytes=saved[number]) for number, needs in self._plain.items()}
        chosen: dict[int, StageChoice] = {}
        for number, stage in self._rank.stages.items():
            limits = self._limits(number, kept)
            try:
                solution = stage.solve(limits, self._solver, self._limit_s, self._seed)
            except InfeasibleBudget as error:
                self._lacking[share] = error.min_budget - limits.forward_bytes
                return None
            assert solution.schedule is not None, "what does not fit is refused"
            chosen[number] = StageChoice(solution, stage.needs(solution.schedule))
        lacking = self._rank.peak_bytes(needs_of(chosen)) - self._rank.budget_bytes
        if lacking > 0:
            self._lacking[share] = lacking
            return None
        return fill_waits(self._rank, chosen)

    def _limits(self, number: int, kept: Mapping[int, StageNeeds]) -> StageLimits:
        rank, held = self._rank, self._rank.holds.stages[number]
        forward, backward = around(rank.order, kept, rank.holds, number)
        room = rank.budget_bytes - max(forward, backward) - held.loss_peak_bytes
        return StageLimits(
            rank.budget_bytes - forward, rank.budget_bytes - backward, min(kept[number].saved_bytes, room)
        )

    def refusal(self) -> InfeasibleBudget:
        most = max(in_flight(self._rank.order).values())
        least = self._rank.budget_bytes + min(self._lacking.values())
        return InfeasibleBudget(
            f"Budget {format_bytes(self._rank.budget_bytes)} is below what stages "
            f"{', '.join(map(str, sorted(self._rank.stages)))} need with {most} micro-batches in flight, about "
            f"{format_bytes(least)}; raise the budget, take smaller micro-batches, or more stages.",
            min_budget=least,
        )
