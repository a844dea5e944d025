"""From a step as it was seen to a plan under a budget.

In: the calls of a step, what surrounds them and what the caller does between them. Out: a `Plan`, within the budget or,
where training has begun and nothing fits, the leanest one that is known.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch

from remat.core.budget import Budget, BudgetUnit, format_bytes
from remat.core.copies import OffloadPlace, computing_steps
from remat.core.files.plan_file import graph_hash, plan_text
from remat.core.problem import Problem
from remat.core.results.plan import Plan
from remat.core.simulate import simulate
from remat.distributed.agreement.agreed import Agreement
from remat.distributed.agreement.facts import Facts
from remat.errors import InfeasibleBudget
from remat.pipeline import Surroundings, make_plan, with_host
from remat.pytorch._compat.distributed import is_pretended
from remat.pytorch.costs.plain_peak import PlainStep
from remat.pytorch.device import device_name, total_bytes
from remat.pytorch.graph.nodes import is_collective
from remat.pytorch.host.shared import place_for_plans
from remat.pytorch.resident.memory import ResidentMemory
from remat.pytorch.run.compose import Call, Outside, Source, compose
from remat.pytorch.run.lower import Lowered
from remat.pytorch.run.progress import Reporter
from remat.pytorch.run.settings import Settings
from remat.pytorch.run.variants import Variant, VariantKey
from remat.pytorch.run.watching.gaps import last_gaps, level_bytes
from remat.solvers.base import infeasible
from remat.within import LeanestSeen

GLOO_THREADS = 2
"""Each holds the buffers of its last collective until it looks for the next."""
Order = tuple[VariantKey, ...]
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


def _torch_version() -> str:
    return str(torch.__version__).split("+")[0]


def surroundings_of(
    variants: Sequence[Variant], resident: Mapping[str, int], plain_peak_bytes: int, ranks: int
) -> Surroundings:
    """What is true of a step of these calls besides their graphs."""
    device = variants[0].captured.device
    return Surroundings(
        resident_bytes=tuple((name, size) for name, size in resident.items() if size),
        plain_peak_bytes=plain_peak_bytes,
        device_bytes=total_bytes(device),
        device=device_name(device),
        torch_version=_torch_version(),
        shapes=tuple(shape for variant in variants for shape in variant.shapes()),
        ranks=ranks,
    )


def facts_of(settings: Settings, variant: Variant, parameters: str, ranks: int) -> Facts:
    """What this rank is about to train, for the others to compare."""
    ops = [(op.target, op.inputs, op.outputs) for op in variant.captured.graph.ops]
    return Facts(
        remat_version=version("remat"),
        torch_version=_torch_version(),
        device=device_name(variant.captured.device),
        ranks=str(ranks),
        budget=_budget_text(settings.budget),
        settings=f"{settings.solver}, seed {settings.seed}, {settings.time_limit_s} s, {settings.counts.value} bytes",
        plan=_digest(plan_text(settings.plan)) if settings.plan is not None else "",
        parameters=parameters,
        shapes=", ".join(variant.shapes()),
        model=f"{_digest(ops)}, a graph of {len(ops)} ops",
    )


def _budget_text(budget: Budget | None) -> str:
    return "none" if budget is None else f"{budget.amount:g} ({budget.unit.value})"


def _digest(item: object) -> str:
    return hashlib.sha256(str(item).encode()).hexdigest()[:12]


def meets_others(variant: Variant) -> bool:
    """Whether a graph has collectives of its own."""
    return any(node is not None and is_collective(node) for node in variant.captured.op_nodes)


def in_flight_bytes(owner: ResidentMemory, calls: Sequence[Call]) -> int:
    """The most that a collective, of an engine or of the graphs, holds a little longer than it runs."""
    sizes = [] if is_pretended() else [size for call in calls for size in _collective_bytes(call)]
    return max(owner.in_flight_bytes(calls[0].captured.device), sum(sorted(sizes)[-GLOO_THREADS:]))


def _collective_bytes(call: Call) -> Iterator[int]:
    captured = call.captured
    for op, node in zip(captured.graph.ops, captured.op_nodes, strict=True):
        if node is not None and is_collective(node) and captured.device.type == "cpu":
            yield sum(captured.size_bytes[value] for value in op.outputs)


def key_of(variant: Variant) -> str:
    """The same on every rank that has captured the same."""
    return graph_hash(variant.captured.graph, variant.captured.size_bytes)


def agreed_plan(
    agreement: Agreement, key: object, seen: WatchedStep, find: Callable[[WatchedStep], Plan], held_bytes: int
) -> Plan:
    """The plan that one rank finds for all, within what the fullest of them has left; its peak is this rank's own.

    What collectives may hold a little longer is left free, and not in the peak: mostly it is gone.
    """
    around, more = seen.surroundings, agreement.more_bytes() + held_bytes
    fullest = replace(around, resident_bytes=(*around.resident_bytes, *([("of others", more)] if more else [])))
    plan = agreement.plan(key, lambda: find(replace(seen, surroundings=fullest)))
    resident = sum(size for _, size in around.resident_bytes)
    less = plan.problem.resident_bytes - resident
    if less == 0:
        return plan
    problem = replace(plan.problem, resident_bytes=resident)
    solution = replace(plan.solution, peak_bytes=plan.solution.peak_bytes - less)
    return replace(plan, problem=problem, solution=solution, breakdown_bytes=around.resident_bytes)


def refuse_what_cannot_fit(budget: Budget, variant: Variant, resident_bytes: int) -> int:
    """The least that a graph alone needs, before the first step runs: what is above the budget is refused."""
    allowed = budget.resolve(plain_peak_bytes=0, device_bytes=total_bytes(variant.captured.device))
    problem = Problem(variant.captured.graph, variant.costs(), allowed, resident_bytes)
    least = simulate(problem, variant.frugal().schedule).peak_bytes
    if least > allowed:
        raise infeasible(problem, least)
    return least


@dataclass(frozen=True, slots=True)
class Search:
    """How a plan is looked for."""

    settings: Settings
    reporter: Reporter
    kept_graph: int
    leanest: LeanestSeen


def plan_within(budget: Budget, how: Search, seen: WatchedStep) -> Plan:
    """Under a budget in bytes; raises `InfeasibleBudget` where nothing is known to fit."""
    with how.reporter.solving() as progress:
        return make_plan(
            seen.calls,
            seen.surroundings,
            budget,
            outside=seen.outside,
            solver=how.settings.solver,
            time_limit_s=how.settings.time_limit_s,
            seed=how.settings.seed,
            counts=how.settings.counts,
            kept_graph=how.kept_graph,
            host=place_for(how.settings.offload, seen.calls),
            seen=how.leanest,
            progress=progress,
        )


def place_for(offload: str, calls: Sequence[Call]) -> OffloadPlace | None:
    """Where values may spend a while; nowhere for a step of several graphs, between which nobody knows what comes."""
    if offload and len(calls) > 1:
        warn_of_several(len(calls))
        return None
    return place_for_plans(offload, calls[0].captured.device)


def moving_problem(problem: Problem, offload: str, calls: Sequence[Call]) -> Problem | None:
    """The problem of a step as it was captured, some of whose values may leave; None where none can."""
    place = place_for(offload, calls)
    return with_host(problem, compose(calls).can_move(), place) if place is not None else None


def dropped_in(plan: Plan, calls: Sequence[Call], outside: Outside, dropped: Iterable[Source]) -> Mapping[Source, int]:
    """Outputs that the plan takes the caller to drop before the step ends, and the last gap in which each is held."""
    if plan.schedule is None or not outside.passed:
        return {}
    return last_gaps(compose(calls, outside), computing_steps(plan.problem.graph, plan.schedule), dropped)


def warn_of_kept_graph() -> None:
    warnings.warn(
        "A backward keeps its graph (retain_graph=True), and with it all that its forward saved: this step can exceed "
        "the budget; the next ones are planned for it.",
        stacklevel=3,
    )


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
    # A search with more room can find what fits after all.
    if plan.predicted_peak > budget.amount:
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
