"""A function with its scans replaced by planned ones.

In: a function of flat arrays. Out: the same function, whose scans ask a `ScanPlans` how to run. Calls are entered to
find scans in them; functions with derivatives of their own stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax

from remat.core.results.plan import PlannedScan, ScanRun
from remat.errors import PlanMismatch
from remat.jax import _compat
from remat.jax.costs.timing import Stopwatch
from remat.jax.graph.program import runs_once
from remat.jax.run.hold import Means
from remat.jax.scans.body import Body, body_under, plan_body
from remat.jax.scans.planned import ScanChoice, planned_scan
from remat.jax.scans.split import IterationRun, in_one, saved_bytes, split

HEAVY_NS = 1e6
ENTERED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2")


Site = tuple[int, tuple[bool, ...]]
"""Which scan, and which of its inputs are differentiated."""


@dataclass(slots=True)
class ScanPlans:
    """How the scans of one function run: within `allowed_bytes` of saved values, all together."""

    watch: Stopwatch
    allowed_bytes: float = 0.0
    bodies: dict[Site, Body] = field(default_factory=dict)
    means: Means = Means.NOTHING
    """What holds the order inside an iteration that makes something again."""
    heavy: Means = Means.NOTHING
    """The same, from the start, of iterations that take long beside what holding takes."""
    in_one: bool = False
    """Whether all iterations of a scan run under one plan."""

    def _split(self, allowed_bytes: float) -> dict[Site, tuple[IterationRun, ...]]:
        return in_one(self.bodies, allowed_bytes) if self.in_one else split(self.bodies, allowed_bytes)

    def means_of(self, body: Body) -> Means:
        return self.heavy if body.frontier[0].time_ns >= HEAVY_NS else self.means

    def choose(self, site: int, params: dict[str, Any], perturbed: Sequence[bool]) -> ScanChoice:
        key = (site, tuple(perturbed))
        if key not in self.bodies:
            self.bodies[key] = plan_body(params, perturbed, self.watch)
        body = self.bodies[key]
        return ScanChoice(body, self._split(self.allowed_bytes)[key], self.means_of(body))

    def planned(self) -> tuple[PlannedScan, ...]:
        """What a file has to say so that the scans run as now."""
        chosen = self._split(self.allowed_bytes)
        return tuple(
            _as_planned(key, self.bodies[key], runs, self.means_of(self.bodies[key])) for key, runs in chosen.items()
        )

    @property
    def is_free(self) -> bool:
        """Whether iterations make something again in an order that XLA chooses."""
        return self.extra_ns > 0 and any(self.means_of(body) is Means.NOTHING for body in self.bodies.values())

    @property
    def saved_bytes(self) -> int:
        return sum(map(saved_bytes, self._split(self.allowed_bytes).values()))

    @property
    def extra_ns(self) -> float:
        """The time of what is made again in all iterations."""
        chosen = self._split(self.allowed_bytes)
        return sum(extra_ns(self.bodies[key], runs) for key, runs in chosen.items())

    def grows_with(self, more_bytes: float) -> bool:
        """Whether iterations could save more if they had so many bytes more."""
        known = self.saved_bytes
        return sum(map(saved_bytes, self._split(known + more_bytes).values())) > known


def _as_planned(key: Site, body: Body, runs: Sequence[IterationRun], means: Means) -> PlannedScan:
    site, perturbed = key
    places = tuple(place for place, follows in enumerate(perturbed) if follows)
    rows = tuple(ScanRun(run.count, tuple(map(int, run.plan.schedule.steps))) for run in runs)
    return PlannedScan(site, places, body.graph_hash, rows, means is not Means.NOTHING, extra_ns(body, runs))


def extra_ns(body: Body, runs: Sequence[IterationRun]) -> float:
    """The time of what a scan's iterations make again."""
    return sum(run.count * (run.plan.time_ns - body.frontier[0].time_ns) for run in runs)


@dataclass(frozen=True, slots=True)
class GivenScans:
    """Scans that run as a file says."""

    watch: Stopwatch
    scans: tuple[PlannedScan, ...]
    means: Means
    """What holds the order of those that are held."""

    def choose(self, site: int, params: dict[str, Any], perturbed: Sequence[bool]) -> ScanChoice:
        places = tuple(place for place, follows in enumerate(perturbed) if follows)
        found = [scan for scan in self.scans if (scan.site, scan.differentiated) == (site, places)]
        if not found:
            raise PlanMismatch(f"The plan was made for another function: it does not know its scan {site}.")
        body, plans = body_under(params, perturbed, self.watch, found[0])
        runs = tuple(IterationRun(run.count, plan) for run, plan in zip(found[0].runs, plans, strict=True))
        return ScanChoice(body, runs, self.means if found[0].held else Means.NOTHING)


def has_scans(jaxpr: Any) -> bool:
    """Whether there is a scan that can be planned."""
    return any(
        _is_planned(equation)
        or (equation.primitive.name in ENTERED and has_scans(_compat.inner_jaxpr(equation.params)))
        for equation in jaxpr.eqns
    )


def _is_planned(equation: Any) -> bool:
    if equation.primitive.name != "scan" or runs_once(equation):
        return False
    params = equation.params
    first, count = _compat.scan_parts(params)
    carries = params["jaxpr"].in_avals[first : first + count]
    return params["length"] > 1 and any(map(_compat.is_differentiable, carries))


def with_planned_scans(traced: Any, plans: ScanPlans | GivenScans) -> Callable[..., list[Any]]:
    """The function that was traced, with its scans run as `plans` say."""

    def run(*values: Any) -> list[Any]:
        return _evaluated(traced.jaxpr, traced.consts, values, plans, [0])

    return run


def _evaluated(
    jaxpr: Any, constants: Sequence[Any], values: Sequence[Any], plans: ScanPlans | GivenScans, site: list[int]
) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *values), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _compat.is_literal(atom) else env[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        inner = _compat.inner_function(name, equation.params) if name in ENTERED else None
        scope = _compat.scope_of(equation)
        with jax.named_scope(scope) if scope else nullcontext():
            if inner is not None and has_scans(inner[0]):
                found = _evaluated(*inner, given, plans, site)
            elif _is_planned(equation):
                found = _planned(equation, given, plans, site)
            else:
                found = _compat.bind(equation.primitive, equation.params, equation.ctx, given)
        env.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _planned(equation: Any, values: Sequence[Any], plans: ScanPlans | GivenScans, site: list[int]) -> list[Any]:
    number, params = site[0], equation.params
    site[0] += 1

    def choose(perturbed: Sequence[bool]) -> ScanChoice:
        return plans.choose(number, params, perturbed)

    return planned_scan(equation.primitive, params, equation.ctx, values, choose)
