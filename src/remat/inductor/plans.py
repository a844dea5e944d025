"""Plans of compiled steps: made of what was chosen, and followed by code that is compiled later.

In: choices for captured graphs, or a plan. Out: a `Plan`, or code that is cut where the plan says. A graph is known by
a digest of its nodes: under another one, another torch version or another device nothing of a plan holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from remat.core.problem import Problem
from remat.core.results.plan import CompiledCut, CompiledStep, Fingerprint, Plan
from remat.core.results.replay import resident_storages
from remat.core.simulate import simulate
from remat.core.solution import Solution
from remat.errors import PlanMismatch
from remat.inductor.dry_run.profile import Origin, as_profile
from remat.inductor.dry_run.timeline import KernelTimeline
from remat.inductor.graph import CompiledGraph, Decided, Ready
from remat.inductor.model.choose import Choice, given, scheduled
from remat.inductor.model.contract import contract
from remat.inductor.model.joint import Half, Joint
from remat.inductor.model.program import MeasuredRates
from remat.inductor.offload import node_times
from remat.inductor.partition import Uncut
from remat.inductor.travel import NodeTimes, Travel
from remat.pipeline import check_fingerprint
from remat.pytorch.device import device_name
from remat.pytorch.host.shared import place_for_plans


def plan_from(
    graphs: Sequence[CompiledGraph],
    choices: Sequence[Choice],
    whole: Choice,
    problem: Problem,
    needed_bytes: int,
    time_ns: float,
) -> Plan:
    """Of what was chosen for each graph, which is `whole` for all of them; the plain peak is for others to tell."""
    device = graphs[0].device
    hashes = tuple(graph.known.joint.digest() for graph in graphs)
    cuts = tuple(_cut(graph, choice) for graph, choice in zip(graphs, choices, strict=True))
    return Plan(
        problem=problem,
        solution=_solution_of(problem, whole),
        fingerprint=Fingerprint(hashes, _torch_version(), device_name(device), ()),
        plain_peak_bytes=0,
        compiled=CompiledStep(problem.resident_bytes + needed_bytes, time_ns, cuts),
    )


def with_kernels(plan: Plan, graph: CompiledGraph, timeline: KernelTimeline) -> Plan:
    """The plan of one graph with what its code was seen to do."""
    assert plan.compiled is not None
    nodes = graph.known.joint.nodes
    origins = {node.name: Origin(node.module, node.phase is Half.BACKWARD) for node in nodes}
    step = as_profile(
        timeline,
        origins,
        tuple(resident_storages(plan, len(timeline.calls))),
        device=plan.fingerprint.device,
        torch_version=plan.fingerprint.torch_version,
        seconds=plan.predicted_time / 1e9,
    )
    return replace(plan, compiled=replace(plan.compiled, step=step))


def problem_of(joint: Joint, rates: MeasuredRates, budget_bytes: int, resident_bytes: int) -> Problem:
    contracted = contract(joint, rates)
    return Problem(contracted.graph, contracted.costs, budget_bytes, resident_bytes)


def _cut(graph: CompiledGraph, choice: Choice) -> CompiledCut:
    nodes = graph.known.joint.nodes
    return CompiledCut(
        saved=tuple(nodes[number].name for number in sorted(choice.saved) if number < len(nodes)),
        is_default=choice.is_default,
        loss_chunks=tuple(item.chunks for item in graph.form.chunked),
        has_copies=choice.unrolled is not None,
    )


def _solution_of(problem: Problem, choice: Choice) -> Solution:
    """A choice is made of what a step adds; its plan is of the whole step, with what is there when it begins."""
    found = choice.solution
    assert found.schedule is not None, "a choice was made of a schedule"
    return replace(
        found,
        peak_bytes=simulate(problem, found.schedule).peak_bytes,
        min_budget_bytes=found.min_budget_bytes + problem.resident_bytes,
    )


def follow(graph: CompiledGraph, inputs: Sequence[Any], plan: Plan) -> Ready:
    """Code for a graph, cut where the plan says; `PlanMismatch` where the plan was made for something else."""
    cuts = plan.compiled.cuts if plan.compiled is not None else ()
    if graph.number >= len(cuts):
        raise PlanMismatch(f"The plan was made for a step of {len(cuts)} graphs, and this one has more; plan again.")
    cut = cuts[graph.number]
    if cut.loss_chunks and not graph.form.chunked:
        form = graph.with_loss_in(cut.loss_chunks)
        if form is not None:
            graph.take(form)
    times: tuple[dict[str, float], dict[str, float]] = {}, {}
    travel = _travel_of(graph, plan, cut, NodeTimes(*times))

    def decide(uncut: Uncut, rates: MeasuredRates) -> Decided:
        decided = _decide(graph, plan, cut, uncut, rates)
        found = node_times(uncut.joint, decided.choice)
        times[0].update(found.forward)
        times[1].update(found.backward)
        return decided

    made = graph.compile(inputs, decide, travel)
    assert isinstance(made, Ready), "a choice leads to code"
    return replace(made, is_planned=True)


def _travel_of(graph: CompiledGraph, plan: Plan, cut: CompiledCut, times: NodeTimes) -> Travel | None:
    """What travels by the plan; `times` is filled in when the graph is traced."""
    if not plan.offload:
        return None
    place = place_for_plans(plan.offload, graph.device)
    if place is None or not cut.away_bytes:
        raise PlanMismatch(
            f"The plan offloads tensors to {plan.offload}, and does not say which, or nothing can be put there; plan "
            "again."
        )
    return Travel(place, cut.away_bytes, times)


def with_travel(plan: Plan, where: str, away_bytes: int) -> Plan:
    """The plan of a single graph, so many bytes of which travel."""
    if not away_bytes or plan.compiled is None:
        return plan
    (cut,) = plan.compiled.cuts
    compiled = replace(plan.compiled, cuts=(replace(cut, away_bytes=away_bytes),))
    return replace(plan, offload=where, compiled=compiled)


def _decide(graph: CompiledGraph, plan: Plan, cut: CompiledCut, uncut: Uncut, rates: MeasuredRates) -> Decided:
    joint = uncut.joint
    _check(graph, plan, joint)
    is_alone = plan.compiled is not None and len(plan.compiled.cuts) == 1
    room = plan.budget_bytes - plan.problem.resident_bytes if is_alone else None
    if cut.has_copies:
        return Decided(scheduled(joint, rates, plan.solution), room_bytes=room)
    number_of = {node.name: number for number, node in enumerate(joint.nodes)}
    choice = given(joint, rates, frozenset(number_of[name] for name in cut.saved if name in number_of))
    return Decided(replace(choice, is_default=cut.is_default), room_bytes=room)


def _check(graph: CompiledGraph, plan: Plan, joint: Joint) -> None:
    wanted = replace(plan.fingerprint, graph_hashes=plan.fingerprint.graph_hashes[graph.number : graph.number + 1])
    found = Fingerprint((joint.digest(),), _torch_version(), device_name(graph.device), wanted.shapes)
    check_fingerprint(replace(plan, fingerprint=wanted), found)


def _torch_version() -> str:
    return str(torch.__version__).split("+")[0]
