"""The only file that knows the order of the arrows:

    capture → profile → compose → budget → solve → plan → lower

In: the calls of one step, captured and profiled. Out: a `Plan`, and a runnable pair of graphs for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from remat.core.budget import Budget
from remat.core.plan import Fingerprint, Plan
from remat.core.problem import Problem
from remat.core.simulate import simulate
from remat.core.solution import Solution
from remat.errors import PlanMismatch

if TYPE_CHECKING:
    from remat.pytorch.compose import Call, Step
    from remat.pytorch.lower import Lowered
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


def make_plan(
    calls: Sequence[Call],
    surroundings: Surroundings,
    budget: Budget,
    *,
    solver: str = "auto",
    time_limit_s: float = 10.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find the fastest schedule of `calls` within `budget`."""
    from remat.pytorch.compose import compose
    from remat.solvers import solve

    step = compose(calls)
    budget_bytes = budget.resolve(
        plain_peak_bytes=surroundings.plain_peak_bytes, device_bytes=surroundings.device_bytes
    )
    resident = sum(size for _, size in surroundings.resident_bytes)
    problem = Problem(step.graph, step.costs, budget_bytes, resident)

    def attempt(problem: Problem) -> Solution:
        return solve(problem, solver, time_limit_s=time_limit_s, seed=seed, progress=progress)

    solution = _tidied(step, problem, attempt)
    return Plan(
        problem=problem,
        solution=solution,
        fingerprint=fingerprint(calls, surroundings),
        plain_peak_bytes=surroundings.plain_peak_bytes,
        breakdown_bytes=surroundings.resident_bytes,
    )


def _tidied(step: Step, problem: Problem, attempt: Callable[[Problem], Solution]) -> Solution:
    """A solution whose ops each run inside their own graph's program.

    With one call every schedule is such. With several, moving an op into its program can raise the peak: then the
    budget given to the solver is lowered by as much.
    """
    reserve = 0
    while True:
        solution = attempt(problem.with_budget(problem.budget_bytes - reserve))
        if solution.schedule is None or len(step.calls) == 1:
            return solution
        schedule = step.tidy(solution.schedule)
        timeline = simulate(problem, schedule)
        if timeline.peak_bytes <= problem.budget_bytes:
            return replace(solution, schedule=schedule, peak_bytes=timeline.peak_bytes)
        reserve += timeline.peak_bytes - problem.budget_bytes


def lower_plan(plan: Plan, calls: Sequence[Call]) -> tuple[Lowered, ...]:
    """What runs for each call under `plan`."""
    from remat.pytorch.compose import compose
    from remat.pytorch.lower import lower

    step = compose(calls)
    if plan.schedule is None:
        raise PlanMismatch(f"The plan is {plan.status.value}: it has no schedule to run; plan again with more memory.")
    parts = step.split(plan.schedule)
    return tuple(lower(call.captured, part) for call, part in zip(calls, parts, strict=True))


def fingerprint(calls: Sequence[Call], surroundings: Surroundings) -> Fingerprint:
    """What a plan for `calls` is valid for."""
    from remat.core.codec import graph_hash

    return Fingerprint(
        graph_hashes=tuple(graph_hash(call.captured.graph, call.costs.size_bytes) for call in calls),
        torch_version=surroundings.torch_version,
        device=surroundings.device,
        shapes=surroundings.shapes,
    )


def check_fingerprint(plan: Plan, found: Fingerprint) -> None:
    """Refuse a plan that was made for something else, and say what differs."""
    wanted = plan.fingerprint
    for what, planned, here in (
        ("torch version", wanted.torch_version, found.torch_version),
        ("device", wanted.device, found.device),
        ("input shapes", ", ".join(wanted.shapes), ", ".join(found.shapes)),
        ("model", " ".join(wanted.graph_hashes), " ".join(found.graph_hashes)),
    ):
        if planned != here:
            raise PlanMismatch(
                f"The plan was made for another {what}: {_short(planned)}; here it is {_short(here)}. Plan again here."
            )


def _short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[:most] + "…"
