"""One model at one batch, trained in every way that the classic experiments compare.

In: what to build, and for the smaller batches what was right for the largest. Out: an `Outcome`. The step is captured
once; then every way to train really runs, in turns with the plain step: per-block checkpointing as PyTorch has it, the
others as schedules. What has a choice is given a limit of time and takes the least memory that it can within it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from remat import zoo
from remat.bench.suite import Effort, Subjects
from remat.core.eager import as_eager
from remat.core.problem import LARGEST_BYTES, floor_bytes
from remat.core.results.bench import LIMITS, BenchTrial, Breakdown, Case, Figures, Way
from remat.core.results.pareto import Pareto
from remat.core.results.replay import replay
from remat.core.schedule import Schedule, plain_schedule
from remat.core.simulate import simulate
from remat.pytorch.explore.captured_step import CapturedStep, Run, prepare
from remat.pytorch.explore.module_blocks import checkpointed, repeated_blocks
from remat.pytorch.explore.pareto import BudgetSearch, as_pareto, trace
from remat.pytorch.measure.measure_step import training_call
from remat.solvers import get_solver
from remat.solvers.base import Solver
from remat.solvers.frontier import Attempt, Candidate, candidate_at, proven_bound_ns
from remat.solvers.leanest import find_leanest, leanest
from remat.solvers.schedule.module_blocks import block_schedule

PRECISIONS = {"bf16": torch.bfloat16}
NEARBY = (1.06, 0.97)
"""Budgets of the smaller batches, as shares of what was right for the largest."""
SOLVERS = {Way.MU_TWO: "mu_two", Way.OPTIMAL: "auto"}
"""Of the ways that have a choice."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Whom to tell, and whether to stop."""

    tell: Callable[[str], None] = lambda what: None
    stop: Callable[[], bool] = lambda: False
    heeded_by: Callable[[Solver], Solver] = lambda solver: solver
    """Makes a solver stop when all stops."""


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    curve: Pareto | None = None
    breakdowns: tuple[Breakdown, ...] = ()


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A schedule to be run, and why it was chosen."""

    way: Way
    limit: float | None
    candidate: Candidate
    gap: float | None = None


class Autocast(nn.Module):
    """A model that computes under autocast, whoever calls it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.model, self.dtype, self.device_type = model, dtype, torch.device(device).type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            return self.model(*args, **kwargs)


def run_batch(
    subjects: Subjects, batch: int, effort: Effort, watcher: Watcher, *, device: str, seed: int, guide: Case | None
) -> Outcome | None:
    """What every way needs; without a `guide`, with the whole curve too. None where it was stopped before any ran."""
    watcher.tell("capturing and measuring")
    example = zoo.build(subjects.model, scale="demo", device=device, seed=seed, batch=batch, **subjects.sizes)
    dtype = PRECISIONS.get(subjects.precision)
    model = example.model if dtype is None else Autocast(example.model, dtype, device)
    subject = prepare(model, example.args, example.kwargs)
    work = _Work(subject, effort, watcher, seed)
    curve, chosen = work.along_curve(f"{subjects.model}, batch {batch}") if guide is None else (None, work.near(guide))
    trials = tuple(work.trials(chosen))
    if not trials:
        return None
    case = Case(batch, subject.problem.resident_bytes, subject.problem.base_time_ns / 1e9, trials)
    return Outcome(case, curve, tuple(work.breakdowns(chosen)) if guide is None else ())


@dataclass(frozen=True, slots=True)
class _Work:
    subject: CapturedStep
    effort: Effort
    watcher: Watcher
    seed: int
    solvers: dict[Way, Solver] = field(init=False)

    def __post_init__(self) -> None:
        heeding = {way: self.watcher.heeded_by(get_solver(name)) for way, name in SOLVERS.items()}
        object.__setattr__(self, "solvers", heeding)

    def along_curve(self, name: str) -> tuple[Pareto, list[_Chosen]]:
        """The curve from the plain peak down, and on it and between its points what is leanest at every limit."""
        others = (*map(get_solver, ("none", "sqrt_n")), self.solvers[Way.MU_TWO])
        search = BudgetSearch(
            budgets=self.effort.points,
            lead=self.solvers[Way.OPTIMAL],
            others=others,
            time_limit_s=self.effort.time_limit_s,
            seed=self.seed,
            tell=lambda done, total, what: self.watcher.tell(what),
            stop=self.watcher.stop,
        )
        curve, found = trace(self.subject, search)
        chosen = [_Chosen(Way.SQRT_N, None, item) for item in found if item.solver == "sqrt_n"]
        for way in SOLVERS:
            chosen += self._at_limits(way, LIMITS, found, self.effort.rounds)
        budgets = {*curve.budgets, *(item.candidate.budget_bytes for item in chosen if item.way is Way.OPTIMAL)}
        curve = replace(curve, budgets=tuple(sorted(budgets, reverse=True)))
        return as_pareto(self.subject, curve.points(found), curve.baselines(found), name), chosen

    def near(self, guide: Case) -> list[_Chosen]:
        """At the first limit alone, around the share of activations that was right there."""
        sqrt_n = candidate_at(self.subject.problem, LARGEST_BYTES, get_solver("sqrt_n"), self._attempt())
        chosen = [] if sqrt_n is None else [_Chosen(Way.SQRT_N, None, sqrt_n)]
        found: list[Candidate] = []
        for trial in guide.at(LIMITS[0]):
            if trial.way in SOLVERS:
                budgets = self._budgets(guide.saved(trial).activations_predicted)
                for budget in budgets:
                    self._solve_at(trial.way, budget, found)
                chosen += self._at_limits(trial.way, LIMITS[:1], found, 1)
        return chosen

    def _budgets(self, saved: float) -> list[int]:
        resident, plain = self.subject.problem.resident_bytes, self.subject.base.plain_peak_bytes
        kept = (1 - saved) * (plain - resident)
        return [plain, *(min(plain, resident + int(kept * share)) for share in NEARBY)]

    def _at_limits(self, way: Way, limits: Sequence[float], found: list[Candidate], rounds: int) -> list[_Chosen]:
        """The leanest at each limit; what is solved on the way is added to `found`."""
        chosen: list[_Chosen] = []
        for limit in limits:
            time_ns = (1 + limit) * self.subject.problem.base_time_ns
            # Along its own curve, which the plain schedule begins, a solver's next budget can be told from the last.
            own = [item for item in found if item.solver in (SOLVERS[way], "none")]
            best = find_leanest(
                own,
                time_ns,
                lambda budget: self._solve_at(way, budget, found),
                floor_bytes=floor_bytes(self.subject.problem)[0],
                rounds=rounds,
            )
            if way is Way.OPTIMAL:
                # Whoever found it, a schedule is as good.
                best = leanest(found, time_ns)
            chosen += [] if best is None else [_Chosen(way, limit, best, self._gap(way, best, found))]
        return chosen

    def _gap(self, way: Way, best: Candidate, found: Sequence[Candidate]) -> float | None:
        """How far the fastest schedule within the same budget can be away; asked of the optimum alone."""
        if way is not Way.OPTIMAL:
            return None
        bound = proven_bound_ns(self.subject.problem, best.budget_bytes, SOLVERS[way], found)
        return max(0.0, 1 - bound / best.solution.time_ns)

    def _solve_at(self, way: Way, budget_bytes: int, found: list[Candidate]) -> Candidate | None:
        if self.watcher.stop():
            return None
        self.watcher.tell(f"{way} at {budget_bytes / self.subject.base.plain_peak_bytes:.2f}x")
        candidate = candidate_at(self.subject.problem, budget_bytes, self.solvers[way], self._attempt())
        found.extend([] if candidate is None else [candidate])
        return candidate

    def _attempt(self) -> Attempt:
        return self.subject.attempt(time_limit_s=self.effort.time_limit_s, seed=self.seed)

    def trials(self, chosen: Sequence[_Chosen]) -> Iterator[BenchTrial]:
        """Everything that was chosen, and what needs no choice, really run."""
        subject, pairs = self.subject, self.effort.pairs
        base = subject.problem.base_time_ns
        if not self._goes_on(Way.PLAIN):
            return
        plain = Figures(subject.base.plain_peak_bytes, 0.0)
        yield _without_choice(Way.PLAIN, plain, subject.run(subject.step, pairs))
        blocks = repeated_blocks(subject.step)
        if blocks and self._goes_on(Way.PER_BLOCK):
            schedule = block_schedule(subject.problem, blocks)
            run = subject.run(_checkpointed_step(subject), pairs)
            yield _without_choice(Way.PER_BLOCK, self._figures(schedule), run)
        for item in chosen:
            if not self._goes_on(item.way if item.limit is None else f"{item.way} within {item.limit:.0%}"):
                return
            candidate = item.candidate
            plan = subject.under(candidate, candidate.budget_bytes)
            predicted = Figures(candidate.peak_bytes, candidate.solution.time_ns / base - 1)
            run = subject.run_plan(plan, pairs)
            yield BenchTrial(
                item.way, item.limit, candidate.budget_bytes, predicted, _measured(run), run.seconds, item.gap
            )

    def _goes_on(self, what: str) -> bool:
        if self.watcher.stop():
            return False
        self.watcher.tell(f"running {what}")
        return True

    def _figures(self, schedule: Schedule) -> Figures:
        problem = as_eager(self.subject.problem)
        timeline = simulate(problem, schedule)
        peak = timeline.peak_bytes + self.subject.slack_bytes(problem, schedule)
        return Figures(peak, timeline.time_ns / problem.base_time_ns - 1)

    def breakdowns(self, chosen: Sequence[_Chosen]) -> Iterator[Breakdown]:
        """What the peak is made of, as it is replayed."""
        problem = self.subject.problem
        schedules: list[tuple[Way, float | None, Schedule]] = [(Way.PLAIN, None, plain_schedule(problem.graph))]
        blocks = repeated_blocks(self.subject.step)
        if blocks:
            schedules.append((Way.PER_BLOCK, None, block_schedule(problem, blocks)))
        for item in chosen:
            if item.candidate.solution.schedule is not None:
                schedules.append((item.way, item.limit, item.candidate.solution.schedule))
        for way, limit, schedule in schedules:
            base = self.subject.base
            eager = way in (Way.PLAIN, Way.PER_BLOCK)
            plan = replace(base, problem=as_eager(base.problem)) if eager else base
            parts = replay(plan, schedule).breakdown()
            yield Breakdown(way, limit, {kind.value: size for kind, size in parts.items()})


def _checkpointed_step(subject: CapturedStep) -> Callable[..., None]:
    """The step with `torch.utils.checkpoint` around each block; it leaves the model as it was."""
    model = subject.step

    def step(*args: Any, **kwargs: Any) -> None:
        with checkpointed(model):
            training_call(model, args, kwargs)()

    return step


def _without_choice(way: Way, predicted: Figures, run: Run) -> BenchTrial:
    return BenchTrial(way, None, None, predicted, _measured(run), run.seconds)


def _measured(run: Run) -> Figures:
    return Figures(run.peak_bytes, run.ratio - 1)
