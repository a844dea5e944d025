"""The only file that knows the order of the arrows:

    capture → profile → compose → budget → solve → plan → lower

In: the calls of one step, captured and profiled. Out: a `Plan`, and a runnable pair of graphs for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from remat.core.budget import Budget, BudgetScope
from remat.core.copies import OffloadPlace, has_copies, movable_of, only_used, with_copies
from remat.core.graph import OpId, ValueId
from remat.core.memory_rules import memory_rules
from remat.core.problem import Problem
from remat.core.results.plan import Fingerprint, Plan
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.core.solution import Status
from remat.errors import PlanMismatch
from remat.within import ARENA_SHARE, MOST_UNCOUNTED_S, LeanestSeen, fit_within, lay_out

if TYPE_CHECKING:
    from remat.pytorch.run.compose import Call, Outside, Step
    from remat.pytorch.run.lower import Lowered
    from remat.solvers import Progress


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is true of a step besides its graphs."""

    resident_bytes: tuple[tuple[str, int], ...]
    """Parameters, buffers, inputs, optimizer state and so on, by class."""
    plain_peak_bytes: int
    device_bytes: int
    device: str
    torch_version: str
    shapes: tuple[str, ...]
    ranks: int = 1
    """How many train together."""


def make_plan(
    calls: Sequence[Call],
    surroundings: Surroundings,
    budget: Budget,
    *,
    outside: Outside | None = None,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    seed: int = 0,
    counts: BudgetScope = BudgetScope.LIVE,
    kept_graph: int = 0,
    host: OffloadPlace | None = None,
    seen: LeanestSeen | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find the fastest schedule of `calls` within `budget`; `outside` is what the caller does between them.

    Where `kept_graph` of its backwards keep their graph, what forwards save stays until the last one. Values may spend
    a while on the `host`, where there is one. `seen` carries the leanest schedule from one search to the next.
    """
    from remat.pytorch.run.compose import compose

    step = compose(calls, outside)
    problem = _problem_of(step, surroundings, budget)
    if host is not None and not kept_graph:
        problem = with_host(problem, step.can_move(), host)
    rules = memory_rules(surroundings.device)
    fitted = fit_within(
        problem,
        solver,
        rules=rules,
        tidy=step.tidy if step.is_tidied else None,
        kept_peak=_kept_peak(problem, step.gaps[len(calls) - 1], kept_graph) if kept_graph else None,
        time_limit_s=time_limit_s,
        seed=seed,
        counts=counts,
        seen=seen,
        progress=progress,
    )
    solution, limit = fitted.solution, min(ARENA_SHARE * time_limit_s, MOST_UNCOUNTED_S)
    arena = fitted.arena or lay_out(problem, solution.schedule, rules=rules, time_limit_s=limit)
    if solution.schedule is not None:
        problem, schedule = only_used(problem, solution.schedule)
        solution = replace(solution, schedule=schedule)
    return Plan(
        problem=problem,
        solution=solution,
        allocator_slack_bytes=fitted.slack_bytes,
        counts=counts,
        arena=arena,
        offload=host.where if host is not None and has_copies(problem.graph) else "",
        fingerprint=fingerprint(calls, surroundings),
        plain_peak_bytes=surroundings.plain_peak_bytes,
        breakdown_bytes=surroundings.resident_bytes,
    )


def _problem_of(step: Step, surroundings: Surroundings, budget: Budget) -> Problem:
    budget_bytes = budget.resolve(
        plain_peak_bytes=surroundings.plain_peak_bytes, device_bytes=surroundings.device_bytes
    )
    return Problem(step.graph, step.costs, budget_bytes, sum(size for _, size in surroundings.resident_bytes))


def _kept_peak(problem: Problem, gap: OpId, kept_graph: int) -> Callable[[Schedule], int]:
    from remat.core.kept_graph import peak_with_kept_graph

    return lambda schedule: peak_with_kept_graph(problem, schedule, gap, kept_graph)


def with_host(problem: Problem, values: Sequence[ValueId], host: OffloadPlace) -> Problem:
    """The problem in which these values may leave the device."""
    movable = [host.link.movable(value, problem.costs.size_bytes[value]) for value in values]
    return with_copies(replace(problem, host_budget_bytes=host.budget_bytes), movable)


def predict_again(plan: Plan, calls: Sequence[Call], outside: Outside) -> Plan:
    """The same schedule for a caller who holds less than it was made for: a lower peak, and nothing proven faster."""
    from remat.pytorch.run.compose import compose

    step = compose(calls, outside)
    problem = replace(plan.problem, graph=step.graph, costs=step.costs)
    problem = with_copies(problem, movable_of(plan.problem))
    if plan.schedule is None:
        raise PlanMismatch(f"The plan is {plan.status.value}: it has no schedule whose peak could be predicted.")
    peak = simulate(problem, plan.schedule).peak_bytes
    if peak == plan.solution.peak_bytes:
        return plan
    rules = memory_rules(plan.fingerprint.device)
    slack = rules.slack_bytes(problem, plan.schedule)
    fastest = problem.base_time_ns
    status = Status.OPTIMAL if plan.solution.time_ns <= fastest else Status.FEASIBLE
    solution = replace(plan.solution, status=status, peak_bytes=peak, bound_ns=fastest)
    capacity = problem.budget_bytes - problem.resident_bytes if plan.counts is BudgetScope.ARENA else None
    arena = lay_out(problem, plan.schedule, rules=rules, capacity_bytes=capacity)
    return replace(plan, problem=problem, solution=solution, allocator_slack_bytes=slack, arena=arena)


def lower_plan(plan: Plan, calls: Sequence[Call], *, join: bool = True) -> tuple[Lowered, ...]:
    """What runs for each call under `plan`; two ops may run in one call only where all sizes are known."""
    from remat.pytorch.host.shared import shared_store
    from remat.pytorch.run.compose import compose
    from remat.pytorch.run.join import joined_ops
    from remat.pytorch.run.lower import lower

    step = compose(calls)
    if plan.schedule is None:
        raise PlanMismatch(f"The plan is {plan.status.value}: it has no schedule to run; plan again with more memory.")
    can_join = join and plan.fingerprint.device.startswith("cpu")
    joined = joined_ops(plan.problem, plan.schedule, step.nodes()) if can_join else frozenset()
    overwrite = plan.counts_overwriting
    store = shared_store(plan.offload, calls[0].captured.device) if plan.offload else None
    return tuple(
        lower(captured, part, overwrite=overwrite, joined=step.own(number, joined), store=store)
        for number, (captured, part) in enumerate(step.split_moved(plan.problem.graph, plan.schedule))
    )


def fingerprint(calls: Sequence[Call], surroundings: Surroundings) -> Fingerprint:
    """What a plan for `calls` is valid for."""
    from remat.core.files.plan_file import graph_hash

    return Fingerprint(
        graph_hashes=tuple(graph_hash(call.captured.graph, call.costs.size_bytes) for call in calls),
        torch_version=surroundings.torch_version,
        device=surroundings.device,
        shapes=surroundings.shapes,
        ranks=surroundings.ranks,
    )


def check_fingerprint(plan: Plan, found: Fingerprint) -> None:
    """Refuse a plan that was made for something else, and say what differs."""
    wanted = plan.fingerprint
    framework = "jax" if wanted.torch_version.startswith("jax") else "torch"
    for what, planned, here in (
        (f"another {framework} version", (wanted.torch_version,), (found.torch_version,)),
        ("another device", (wanted.device,), (found.device,)),
        ("another number of ranks", (str(wanted.ranks),), (str(found.ranks),)),
        ("another model", (_count(wanted),), (_count(found),)),
        ("other shapes", wanted.shapes, found.shapes),
        ("another model", wanted.graph_hashes, found.graph_hashes),
    ):
        if planned != here:
            there, now = _first_difference(planned, here)
            raise PlanMismatch(f"The plan was made for {what}: {there} in the plan and {now} here; plan again.")


def _count(fingerprint: Fingerprint) -> str:
    return f"{len(fingerprint.shapes)} inputs and parameters"


def _first_difference(planned: Sequence[str], here: Sequence[str]) -> tuple[str, str]:
    """Of two lists that differ, the first members that do; a model has hundreds of inputs, parameters included."""
    if len(planned) != len(here):
        return f"{len(planned)} graphs", f"{len(here)}"
    number = next(number for number, (left, right) in enumerate(zip(planned, here, strict=True)) if left != right)
    prefix = f"number {number} is " if len(planned) > 1 else ""
    return f"{prefix}{_short(planned[number])}", _short(here[number])


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most // 3] + "…"
