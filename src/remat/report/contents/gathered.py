"""What one report is about: a step before and after, the plan between them, and the curve they lie on.

In: plans, profiles and curves, in any order. Out: a `Report`, from which every export is made. A plan brings its own
two steps, replayed; of two profiles the first is the step before, the second the step after. What each step takes with
and without sharing is found here, once for all exports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from remat.core.results.pareto import Pareto
from remat.core.results.plan import Plan
from remat.core.results.profile import StepProfile
from remat.core.results.replay import replay, replay_plain
from remat.errors import UnknownName
from remat.layout.footprint import Footprint, footprint

Source: TypeAlias = Plan | StepProfile | Pareto
_Kind = TypeVar("_Kind", Plan, StepProfile, Pareto)
PLAIN, PLANNED = "Plain PyTorch", "With Remat"


@dataclass(frozen=True, slots=True)
class Report:
    name: str
    before: StepProfile | None = None
    after: StepProfile | None = None
    plan: Plan | None = None
    pareto: Pareto | None = None
    footprints: tuple[Footprint, ...] = ()
    """One for each of `steps`."""

    @property
    def steps(self) -> tuple[tuple[str, StepProfile], ...]:
        """The steps that are there, each with its title."""
        known = (PLAIN, PLANNED) if self.plan is not None else ("Before", "After")
        first = known[0] if self.after is not None or self.plan is not None else "Memory in use"
        titles = (first, self.before), (known[1], self.after)
        return tuple((title, step) for title, step in titles if step is not None)

    @property
    def budget_bytes(self) -> int | None:
        return self.plan.budget_bytes if self.plan is not None else None


def gather(*sources: Source, name: str = "", otherwise: str = "Training step") -> Report:
    """One report from at most one plan, two profiles and one curve; `otherwise` is its name where none has one."""
    plan = _only(Plan, sources)
    pareto = _only(Pareto, sources)
    profiles = [source for source in sources if isinstance(source, StepProfile)]
    if not sources or len(profiles) > 2:
        raise UnknownName(
            f"A report is made from a plan, one or two profiles, a Pareto curve, or several of these; found "
            f"{len(profiles)} profiles among {len(sources)} sources."
        )
    before = profiles[0] if profiles else replay_plain(plan) if plan is not None else None
    after = profiles[1] if len(profiles) > 1 else _planned(plan)
    known = (profile.name for profile in (before, after, pareto) if profile is not None and profile.name)
    found = (
        _footprint(step, plan if step is after and len(profiles) < 2 else None)
        for step in (before, after)
        if step is not None
    )
    return Report(name or next(known, otherwise), before, after, plan, pareto, tuple(found))


def _footprint(step: StepProfile, plan: Plan | None) -> Footprint:
    """What the step takes; the plan that it was replayed from knows its arena."""
    return footprint(step, plan.arena_bytes if plan is not None else None)


def _only(kind: type[_Kind], sources: tuple[Source, ...]) -> _Kind | None:
    found = [source for source in sources if isinstance(source, kind)]
    if len(found) > 1:
        raise UnknownName(f"A report holds one {kind.__name__}; found {len(found)}: write one report for each.")
    return found[0] if found else None


def _planned(plan: Plan | None) -> StepProfile | None:
    if plan is not None and plan.compiled is not None and plan.compiled.step is not None:
        return plan.compiled.step
    return replay(plan, plan.schedule) if plan is not None and plan.schedule is not None else None
