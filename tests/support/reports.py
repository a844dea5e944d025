"""Plans, profiles and curves for tests of reports, made without torch."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.core.plans import small_plan

from remat.core import Fingerprint, Plan, plain_schedule, simulate
from remat.core.results.pareto import Pareto, ParetoPoint
from remat.core.results.profile import StepProfile
from remat.core.results.replay import replay_plain
from remat.solvers import solve
from remat.zoo import synthetic

PLAN = small_plan()


def measured(name: str = "small") -> StepProfile:
    """A step as a profiler would give it: no values of a plan, not an estimate."""
    step = replay_plain(PLAN, name)
    return replace(step, is_estimate=False, storages=tuple(replace(item, value=-1) for item in step.storages))


def curve() -> Pareto:
    base, plain = PLAN.problem.base_time_ns, PLAN.plain_peak_bytes
    points = (
        ParetoPoint("auto", plain, plain, base, base),
        ParetoPoint("auto", plain // 2, plain // 2, 1.2 * base, 1.1 * base, plain // 2, 1.25),
    )
    others = tuple(ParetoPoint(name, plain // 3, plain // 3, 1.5 * base, base) for name in ("full", "sqrt_n"))
    return Pareto("small", "cpu", plain, base, plain // 4, points, others)


def large_plan(layers: int = 57) -> Plan:
    """A transformer of about 88 ops a layer under 0.6 of its memory."""
    problem = synthetic.transformer(layers)
    peak = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    problem = problem.with_budget(peak * 6 // 10)
    return Plan(
        problem=problem,
        solution=solve(problem, "selective", time_limit_s=1.0),
        fingerprint=Fingerprint(("abc",), "2.13.0", "cuda", ("int64[4, 1024]",)),
        plain_peak_bytes=peak,
        breakdown_bytes=(("parameters", problem.resident_bytes),),
    )
