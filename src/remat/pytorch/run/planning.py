"""From a step as it was seen to a plan under a budget.

In: the calls of a step, what surrounds them and what the caller does between them. Out: a `Plan`, within the budget or,
where training has begun and nothing fits, the leanest one that is known.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from remat.core.budget import Budget, BudgetUnit, format_bytes
from remat.core.copies import OffloadPlace
from remat.core.results.plan import Plan
from remat.errors import InfeasibleBudget
from remat.pipeline import LeanestSeen, Surroundings, make_plan
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.host.shared import place_for_plans
from remat.pytorch.run.compose import Call, Outside, Source
from remat.pytorch.run.gaps import level_bytes
from remat.pytorch.run.lower import Lowered
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import Settings
from remat.pytorch.run.variants import Variant

Order = tuple[tuple[int, tuple[int, ...]], ...]
"""The variants that a step calls, by key, in the order of their forwards."""


Key = tuple[Order, bool]
"""An order, and whether gradients of an earlier backward were there when the step began."""


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A step as it was watched: what a plan is made from, under this budget or the next."""

    key: Key
    calls: Sequence[Call]
    surroundings: Surroundings
    outside: Outside


@dataclass(frozen=True, slots=True)
class Planned:
    key: Key
    made: Plan
    """As the solver left it."""
    plan: Plan
    """With the peak that goes with how the caller holds its outputs."""
    lowered: tuple[Lowered, ...]
    ending: Mapping[Source, int]
    """Outputs that the plan takes the caller to drop before the step ends, and the last gap in which each is held."""

    @property
    def allowed_bytes(self) -> int:
        """What a step may need; a plan above its budget was told already."""
        return max(self.plan.budget_bytes, self.plan.predicted_peak)


def plan_within(
    budget: Budget,
    seen: WatchedStep,
    settings: Settings,
    reporter: Reporter,
    *,
    kept_graph: int,
    leanest: LeanestSeen,
) -> Plan:
    """Under a budget in bytes; raises `InfeasibleBudget` where nothing is known to fit."""
    with reporter.solving() as progress:
        return make_plan(
            seen.calls,
            seen.surroundings,
            budget,
            outside=seen.outside,
            solver=settings.solver,
            time_limit_s=settings.time_limit_s,
            seed=settings.seed,
            counts=settings.counts,
            kept_graph=kept_graph,
            host=_place_for(settings, seen.calls),
            seen=leanest,
            progress=progress,
        )


def _place_for(settings: Settings, calls: Sequence[Call]) -> OffloadPlace | None:
    """Where values may spend a while; nowhere for a step of several graphs, between which nobody knows what comes."""
    if settings.offload and len(calls) > 1:
        warn_of_several(len(calls))
        return None
    return place_for_plans(settings.offload, calls[0].captured.device)


def warn_of_several(count: int) -> None:
    warnings.warn(
        f"This step is {count} graphs, so nothing of it is offloaded; it is planned by recomputation alone.",
        stacklevel=3,
    )


MOST_MISSING, MOST_BESIDES = 0.05, 1.0
"""Which share of what its graphs read and write a followed step may leave out, and do besides: code between graphs."""


def leanest_plan(budget: Budget, refused: InfeasibleBudget, plan_for: Callable[[Budget], Plan]) -> Plan:
    """A training that has begun goes on: with as little memory as is known to do, and a warning."""
    least = refused.min_budget
    while True:
        try:
            plan = plan_for(Budget(least, BudgetUnit.BYTES))
            break
        except InfeasibleBudget as error:
            least = max(error.min_budget, least + least // 50 + 1)
    warn_of_excess(refused, plan.predicted_peak - int(budget.amount))
    return plan


def warn_of_excess(refused: InfeasibleBudget, excess_bytes: int) -> None:
    """Say why a training that has begun needs more than its budget, and by how much."""
    warnings.warn(
        f"{str(refused).split(';')[0]}: this step has begun, so it goes on with the leanest plan known, "
        f"{format_bytes(excess_bytes)} over its budget.",
        stacklevel=2,
    )


def _went_the_same_way(whole: PlainStep, variants: Sequence[Variant]) -> bool:
    """Whether a step that was followed with numbers that were made up does what its graphs do, and little besides."""
    if not whole.assumes:
        return True
    in_graphs = Counter(op for variant in variants for op in variant.plain.ops_by_key())
    followed = Counter(whole.ops_by_key())
    total, missing, besides = map(_touched, (in_graphs, in_graphs - followed, followed - in_graphs))
    return missing <= MOST_MISSING * total and besides <= MOST_BESIDES * total


def _touched(ops: Counter[tuple[str, int]]) -> int:
    # Each graph was followed back from ones in place of gradients, which the whole step has none of.
    return sum(size for key, size in ops.elements() if not key.startswith("aten.ones_like"))


def _dropped_bytes(outside: Outside, call: int, before: int) -> int:
    """What a graph returned that is gone when its backward starts, after gap `before`."""
    made = (item for item in outside.passed if item.source is not None and item.source[0] == call)
    return sum(item.size_bytes for item in made if item.born == call and item.held <= before)


def plain_step_bytes(variants: Sequence[Variant], resident: int, outside: Outside, *, is_one_call: bool) -> int:
    """The peak of plain eager: of each graph and each gap, on top of what earlier graphs and the caller hold."""
    whole = variants[0].plain.whole
    if whole is not None and is_one_call and _went_the_same_way(whole, variants):
        # The step's code was followed from end to end, gaps and all; between forward and backward is the caller.
        between = outside.workspace_bytes[len(variants) - 1] if outside.workspace_bytes else 0
        between += variants[-1].incoming_bytes()
        return resident + max(whole.peak_bytes(), whole.held_bytes + between) - whole.resident_bytes
    held = [variant.held_bytes() for variant in variants]
    count = len(held)
    dropped = [_dropped_bytes(outside, number, 2 * count - 2 - number) for number in range(count)]
    peaks = [variant.plain_peak_bytes(gone) for variant, gone in zip(variants, dropped, strict=True)]
    found = [0]
    for number, peak in enumerate(peaks):
        levels = (level_bytes(outside, gap) for gap in (number - 1, 2 * count - 2 - number))
        found.append(sum(held[:number]) + peak + max(levels))
    for gap in range(2 * count):
        waiting = sum(held[: min(gap + 1, 2 * count - 1 - gap)])
        is_measured = gap < len(outside.most_bytes)
        found.append(waiting + (outside.most_bytes[gap] if is_measured else level_bytes(outside, gap)))
    return resident + max(found)
