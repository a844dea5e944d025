"""Plans for new sizes from schedules that are known, at once; better ones are looked for while training goes on.

In: a step of one graph at sizes that nobody has planned, and the schedules known for that graph. Out: the plan of the
fastest that fits there, by simulation at the largest sizes of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from remat.core.budget import Budget, BudgetScope
from remat.core.cache_file import cache_folder
from remat.core.memory_rules import memory_rules
from remat.core.problem import Problem
from remat.core.results.plan import Plan
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.errors import InfeasibleBudget
from remat.pipeline import Surroundings, fingerprint
from remat.pytorch.run.compose import Step, compose
from remat.pytorch.run.planning import Planned, WatchedStep
from remat.pytorch.run.settings import Settings
from remat.pytorch.run.shapes.background import Background
from remat.pytorch.run.shapes.pool import SchedulePool
from remat.solve_apart import SearchApart
from remat.solvers import solve

WORTHWHILE = 0.005
"""A plan that is slower than the step without recomputation by less is not looked at again."""
TOO_SLOW = 0.1
"""Where all that is known and fits is slower than the step without recomputation by more, a glance is worth it."""
GLANCE, GLANCE_S = "pressure", 0.2
"""A solver that takes milliseconds, and the most that it may take."""
TRANSFERRED = "known schedules"
"""Who found a plan that was made at other sizes."""


@dataclass(slots=True)
class PlanTransfer:
    """What is known of graphs with sizes left open, and what is being looked for."""

    pool: SchedulePool = field(default_factory=lambda: SchedulePool(cache_folder() / "schedules"))
    background: Background = field(default_factory=Background)
    _tried: dict[object, int] = field(default_factory=dict)
    """For each bucket, how many of the pool's schedules were tried for its plan."""

    def plan(self, seen: WatchedStep, budget: Budget, lean: Schedule) -> Plan | None:
        """A plan from what is known, of which the call's own `lean` schedule is some; None where nothing fits."""
        step = compose(seen.calls, seen.outside)
        if step.is_tidied:
            return None
        problem = _problem(step, seen.surroundings, budget)
        self.pool.add(problem.graph, step.join([lean]), keep=False)
        known = self.pool.of(problem.graph)
        self._tried[seen.key] = len(known)
        found = _fastest(problem, known, seen.surroundings.device)
        if found is None or found.time_ns > (1 + TOO_SLOW) * problem.base_time_ns:
            found = self._at_a_glance(problem, seen.surroundings.device) or found
        return _plan_of(problem, found, seen) if found is not None else None

    def _at_a_glance(self, problem: Problem, device: str) -> Solution | None:
        """What the quickest of the good solvers finds; None where that does not fit."""
        reserve = memory_rules(device).least_slack_bytes(problem)
        try:
            solved = solve(problem.with_budget(problem.budget_bytes - reserve), GLANCE, time_limit_s=GLANCE_S)
        except InfeasibleBudget:
            return None
        found = _fastest(problem, [_schedule(solved)], device)
        if found is not None:
            self.pool.add(problem.graph, _schedule(found))
        return found

    def learn(self, planned: Planned, settings: Settings) -> None:
        """What was solved for serves other sizes of its graph; what was not is solved for while training goes on."""
        plan = planned.plan
        if plan.schedule is None or plan.offload:
            return
        if plan.solution.solver != TRANSFERRED:
            self.pool.add(plan.problem.graph, plan.schedule)
        elif plan.overhead > WORTHWHILE:
            how = settings.solver, settings.time_limit_s, settings.seed
            self.background.ask(planned.key, SearchApart(plan.problem, plan.fingerprint.device, *how))

    def collect(self) -> None:
        """Between two steps: take in what was found."""
        for _, search, schedule in self.background.take():
            self.pool.add(search.problem.graph, schedule)

    def better(self, planned: Planned) -> Plan | None:
        """A faster plan for a bucket, by schedules that came after its own was made."""
        plan = planned.plan
        known = self.pool.of(plan.problem.graph)
        tried = self._tried.get(planned.key, len(known))
        self._tried[planned.key] = len(known)
        if tried == len(known) or plan.solution.solver != TRANSFERRED:
            return None
        found = _fastest(plan.problem, known[tried:], plan.fingerprint.device)
        if found is None or found.time_ns >= plan.solution.time_ns:
            return None
        slack = memory_rules(plan.fingerprint.device).slack_bytes(plan.problem, _schedule(found))
        return replace(plan, solution=found, allocator_slack_bytes=slack)


def _problem(step: Step, surroundings: Surroundings, budget: Budget) -> Problem:
    allowed = budget.resolve(plain_peak_bytes=surroundings.plain_peak_bytes, device_bytes=surroundings.device_bytes)
    return Problem(step.graph, step.costs, allowed, sum(size for _, size in surroundings.resident_bytes))


def _fastest(problem: Problem, known: Iterable[Schedule], device: str) -> Solution | None:
    """Of those that fit, by simulation."""
    rules = memory_rules(device)
    best: Solution | None = None
    for schedule in known:
        seen = simulate(problem, schedule)
        if best is not None and seen.time_ns >= best.time_ns:
            continue
        if seen.peak_bytes + rules.slack_bytes(problem, schedule) <= problem.budget_bytes:
            bound = problem.base_time_ns
            status = Status.OPTIMAL if seen.time_ns <= bound else Status.FEASIBLE
            best = Solution(status, schedule, seen.time_ns, seen.peak_bytes, bound, problem.budget_bytes, TRANSFERRED)
    return best


def _plan_of(problem: Problem, solution: Solution, seen: WatchedStep) -> Plan:
    around = seen.surroundings
    slack = memory_rules(around.device).slack_bytes(problem, _schedule(solution))
    return Plan(
        problem=problem,
        solution=solution,
        allocator_slack_bytes=slack,
        counts=BudgetScope.LIVE,
        arena=None,
        offload="",
        fingerprint=fingerprint(seen.calls, around),
        plain_peak_bytes=around.plain_peak_bytes,
        breakdown_bytes=around.resident_bytes,
    )


def _schedule(solution: Solution) -> Schedule:
    assert solution.schedule is not None, "what fits has a schedule"
    return solution.schedule
