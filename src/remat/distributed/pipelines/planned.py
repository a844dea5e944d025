"""`plan_pipeline`: a schedule of torch.distributed.pipelining whose stages run within a budget on every rank.

At its first step each rank captures its stages, measures their ops and plans them for as many micro-batches as its
schedule has in flight; ranks tell each other what their stages take, and a budget that is refused on one is refused on
all. From then on every micro-batch of a stage runs the same plan. A stage that waits for gradients computes again in
the meantime what its backward begins with.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat.core.budget import Budget, parse_budget
from remat.core.results.plan import Plan
from remat.distributed.agreement.members import group_ranks, introduce
from remat.distributed.agreement.ranks import Ranks, error_of
from remat.distributed.agreement.vigil import Vigil
from remat.distributed.pipelines.actions import Action, Orders, StageWork, at_once, in_flight, is_split, orders_of
from remat.distributed.pipelines.choose import Choices, RankProblem, choose, needs_of, without_plan
from remat.distributed.pipelines.early import early_backward
from remat.distributed.pipelines.rank_memory import StageNeeds
from remat.distributed.pipelines.stage_session import StageSession, captured_stage, stage_module
from remat.distributed.pipelines.surroundings import StageSurroundings, rank_problem, stage_plan
from remat.distributed.pipelines.timing import PipelineTimes, follow_pipeline
from remat.errors import InfeasibleBudget, RematError
from remat.pytorch._compat import pipelining
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.lower import lower
from remat.pytorch.run.optimize import listed
from remat.pytorch.run.runner import Runner
from remat.pytorch.run.variants import Variant

EARLY = "remat: computed early"
"""Where a profiler shows what runs while a stage waits."""


@dataclass(slots=True)
class PlannedStage:
    """A stage of this rank."""

    stage: Any
    session: StageSession
    runner: Runner

    @property
    def number(self) -> int:
        return int(self.stage.stage_index)

    def captured(self, args: Any, kwargs: Any) -> Variant:
        """Traced for a micro-batch, where torch has not called it yet."""
        inputs = args if self.stage.is_first else pipelining.received(self.stage)
        return captured_stage(self.session, self.runner, inputs, kwargs, f"Stage {self.number}")


@dataclass(slots=True)
class PlannedPipeline:
    """What was planned for the stages of this rank; empty until the first step."""

    schedule: Any
    stages: list[PlannedStage]
    budget: Budget
    optimizers: Sequence[torch.optim.Optimizer]
    solver: str
    time_limit_s: float
    seed: int
    fills: bool
    orders: Orders
    rank: int
    budget_bytes: int = 0
    plain_peak_bytes: int = 0
    predicted_peak: int = 0
    """Of this rank."""
    plans: dict[int, Plan] = field(default_factory=dict)
    """For each stage of this rank."""
    needs: dict[int, StageNeeds] = field(default_factory=dict)
    """For each stage of every rank."""
    _place: int = 0
    """How many actions of the step under way are over, as far as was looked."""

    @property
    def order(self) -> tuple[Action, ...]:
        """What this rank computes in a step."""
        return self.orders[self.rank]

    @property
    def in_flight(self) -> dict[int, int]:
        """For each stage of this rank, the most micro-batches that wait in it."""
        return in_flight(self.order)

    @property
    def times(self) -> PipelineTimes:
        """When ranks are expected to run what."""
        return follow_pipeline(self.orders, self.needs, fills=self.fills)

    @property
    def times_without_filling(self) -> PipelineTimes:
        """The same if no rank computed again while it waits."""
        return follow_pipeline(self.orders, self.needs, fills=False)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the schedule's own."""
        if not pipelining.trains(self.schedule):
            return type(self.schedule).step(self.schedule, *args, **kwargs)
        if not self.plans:
            peers = self._peers()
            with nullcontext() if peers is None else Vigil(peers):
                self._plan(args, kwargs)
        self._place = 0
        for item in self.stages:
            item.session.begin_step(self._micros(item.number))
        try:
            with pipelining.before_waits(self._compute_early):
                return type(self.schedule).step(self.schedule, *args, **kwargs)
        finally:
            for item in self.stages:
                item.session.begin_step()

    def _micros(self, stage: int) -> tuple[int, ...]:
        """In the order in which they go forward in a stage."""
        return tuple(item.micro for item in self.order if item.stage == stage and item.work is StageWork.FORWARD)

    def _compute_early(self) -> None:
        """This rank is about to wait: where that is for gradients, there may be something to do."""
        sessions = {item.number: item.session for item in self.stages}
        while self._place < len(self.order) and _is_over(self.order[self._place], sessions):
            self._place += 1
        action = self.order[self._place] if self._place < len(self.order) else None
        if action is None or action.work is StageWork.FORWARD or not self.fills:
            return
        sessions[action.stage].compute_early(action.micro, f"{EARLY} {action}")

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        problem, self.plain_peak_bytes = self._problem(args, dict(kwargs))
        if self.fills:
            plain = follow_pipeline(self.orders, self._met(needs_of(without_plan(problem))), fills=False)
            waits = {number: plain.waits_for_gradients(number) for number in problem.stages}
            problem = replace(problem, waits_ns=waits)
        try:
            choices = choose(problem, solver=self.solver, time_limit_s=self.time_limit_s, seed=self.seed)
        except InfeasibleBudget as error:
            self._met({}, error)
            raise
        self.needs = self._met(needs_of(choices))
        self.budget_bytes = problem.budget_bytes
        self.predicted_peak = problem.peak_bytes(needs_of(choices))
        self._install(problem, choices)

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[RankProblem, int]:
        own = {name: kwargs.pop(name, None) for name in ("target", "losses", "return_outputs", "loss_kwargs")}
        micro = pipelining.first_of_batch(self.schedule, args, kwargs, own["target"])
        pipelining.initialize(self.schedule, *micro)
        variants = {item.number: (item.stage, item.captured(*micro[:2])) for item in self.stages}
        around = StageSurroundings(
            modules=nn.ModuleList(item.stage.submod for item in self.stages),
            optimizers=self.optimizers,
            batch=(args, kwargs, own["target"]),
            target=micro[2],
            returns_outputs=own["return_outputs"] is not False,
        )
        return rank_problem(variants, self.order, self.schedule, around, self.budget)

    def _met(self, needs: Mapping[int, StageNeeds], refused: InfeasibleBudget | None = None) -> dict[int, StageNeeds]:
        """What every rank says of its stages; what one refuses all refuse."""
        peers = self._peers()
        said: dict[str, Any] = {str(number): _as_said(item) for number, item in needs.items()}
        if refused is not None:
            said = {"refused": str(refused), "min_budget": refused.min_budget}
        verdict = _gathered([said]) if peers is None else _asked(peers, said)
        if verdict["refused"]:
            raise refused or error_of(verdict)
        return {int(number): StageNeeds(**item) for number, item in verdict["stages"].items()}

    def _peers(self) -> Ranks | None:
        return group_ranks(pipelining.group_of_stage(self.stages[0].stage), "pipeline")

    def _install(self, problem: RankProblem, choices: Choices) -> None:
        needs = needs_of(choices)
        for item in self.stages:
            choice, stage = choices[item.number], problem.stages[item.number]
            item.session.program = lower(stage.captured, choice.schedule)
            item.session.early = early_backward(stage.captured, item.session.program) if self.fills else None
            plain = self.plain_peak_bytes, item.session.graphs[0].variant()
            item.session.made = stage_plan(problem, needs, item.number, choice, plain)
            self.plans[item.number] = item.session.made


def plan_pipeline(
    stages: Any,
    schedule: Any,
    *,
    budget: str | int | float | Budget,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    solver: str = "auto",
    time_limit: float = 10.0,
    seed: int = 0,
    fill_bubbles: bool = True,
) -> PlannedPipeline:
    """Have the stages of this rank run within `budget`: bytes, "8GiB", or "0.5x" of what they need without a plan.

    `schedule.step` plans at its first call, then runs as before. Every rank of the pipeline calls this.
    """
    from remat.solvers import get_solver

    get_solver(solver)
    given = list(stages) if isinstance(stages, (list, tuple)) else [stages]
    _check(given, schedule)
    introduce()
    orders = orders_of(pipelining.orders_of(schedule))
    if is_split(orders):
        warnings.warn(
            f"{type(schedule).__name__} runs backward in two parts, and a plan has one: all of it runs where the first "
            "part would, so ranks wait as under ScheduleInterleaved1F1B.",
            stacklevel=2,
        )
        pipelining.go_back_at_once(given)
        orders = at_once(orders)
    wrapped = []
    for stage in given:
        module, session, runner = stage_module(stage.submod, ResidentMemory(stage.submod))
        stage.submod = module
        wrapped.append(PlannedStage(stage, session, runner))
    planned = PlannedPipeline(
        schedule,
        wrapped,
        parse_budget(budget),
        listed(optimizer),
        solver,
        time_limit,
        seed,
        fill_bubbles,
        orders,
        given[0].group_rank,
    )
    schedule.step = functools.partial(PlannedPipeline.step, planned)
    return planned


def _check(given: Sequence[Any], schedule: Any) -> None:
    if not pipelining.is_schedule(schedule):
        raise RematError(
            f"The schedule is a {type(schedule).__name__}, not one of torch.distributed.pipelining; give "
            "ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or another of them."
        )
    if list(map(id, given)) != list(map(id, pipelining.stages_of(schedule))):
        raise RematError(
            f"The schedule runs {len(pipelining.stages_of(schedule))} stages on this rank and {len(given)} were given, "
            "or others; give those that the schedule was made with."
        )
    own = next((stage for stage in given if stage.dw_builder is not None), None)
    if own is not None:
        raise RematError(
            f"Stage {own.stage_index} was made with a dw_builder, which runs a part of backward apart, and a plan runs "
            "all of it at once; make the stage without, or leave the pipeline unplanned."
        )
    if "step" in vars(schedule):
        raise RematError("This schedule is planned already; plan a schedule once.")


def _is_over(action: Action, sessions: Mapping[int, StageSession]) -> bool:
    session = sessions[action.stage]
    return action.micro in (session.forwards if action.work is StageWork.FORWARD else session.backwards)


def _as_said(needs: StageNeeds) -> dict[str, Any]:
    return {name: getattr(needs, name) for name in StageNeeds.__dataclass_fields__}


def _asked(peers: Ranks, said: dict[str, Any]) -> dict[str, Any]:
    verdict: dict[str, Any] = peers.meet(said, _gathered)
    return verdict


def _gathered(said: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    refused = next((item for item in said if item and "refused" in item), None)
    if refused is not None:
        return refused
    stages = {number: needs for item in said if item for number, needs in item.items()}
    return {"refused": "", "stages": stages}
