"""Plans as versioned JSON, and the hash that ties a plan to its graph.

Loading trusts nothing: after the fields have been checked, the schedule is validated against the problem in the same
file and its recorded peak and time are compared with a simulation; so is its arena with the lives of its buffers.
Whatever fails is a `FileFormatError`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from remat.core.arena import Arena
from remat.core.budget import BudgetScope
from remat.core.copies import has_copies
from remat.core.document import Record, read_document, write_document
from remat.core.files.problem_file import decode_problem, encode_problem
from remat.core.files.profile_file import decode_profile, encode_profile
from remat.core.graph import Graph, OpId
from remat.core.problem import LARGEST_BYTES, Problem
from remat.core.results.plan import CompiledCut, CompiledStep, Fingerprint, Plan, PlannedScan, ScanRun
from remat.core.schedule import Schedule
from remat.core.simulate import simulate
from remat.core.solution import Solution, Status
from remat.core.validate import validate
from remat.errors import FileFormatError, InvalidLayout, InvalidSchedule

FORMAT, VERSION = "remat-plan", 4
_TOLERANCE = 1e-9


def graph_hash(graph: Graph, size_bytes: Sequence[int]) -> str:
    """Equal for graphs that compute the same from the same; names, modules and times do not count."""
    ops = [[op.target, op.inputs, op.outputs, op.backward, op.recomputable] for op in graph.ops]
    text = json.dumps([ops, list(size_bytes), graph.outputs], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def save_plan(plan: Plan, path: Path) -> None:
    """Write `plan` as JSON; the file appears whole or not at all."""
    write_document(path, encode_plan(plan))


def plan_text(plan: Plan) -> str:
    """The same as one line, for another process to read."""
    return json.dumps(encode_plan(plan), separators=(",", ":"))


def plan_from_text(text: str, origin: str = "the plan of another rank") -> Plan:
    """Checked as one that is read from a file."""
    return decode_plan(Record(json.loads(text), origin), Path(origin))


def encode_plan(plan: Plan) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "problem": encode_problem(plan.problem),
        "solution": _encode_solution(plan.solution),
        "fingerprint": _encode_fingerprint(plan.fingerprint),
        "plain_peak_bytes": plan.plain_peak_bytes,
        "allocator_slack": plan.allocator_slack_bytes,
        "breakdown": [{"name": name, "bytes": count} for name, count in plan.breakdown_bytes],
        "counts": plan.counts.value,
        "arena": None if plan.arena is None else asdict(plan.arena),
        "compiled": None if plan.compiled is None else _encode_compiled(plan.compiled),
        "offload": plan.offload,
    }


def load_plan(path: Path) -> Plan:
    """Read a plan and check it against itself; a damaged or foreign file is a `FileFormatError`."""
    return decode_plan(read_document(path, {FORMAT: VERSION}), path)


def decode_plan(record: Record, path: Path) -> Plan:
    """The plan of a file that was read already, checked against itself."""
    problem = decode_problem(record.record("problem"))
    plan = Plan(
        problem=problem,
        solution=_decode_solution(record.record("solution")),
        fingerprint=_decode_fingerprint(record.record("fingerprint")),
        plain_peak_bytes=record.integer("plain_peak_bytes"),
        allocator_slack_bytes=record.integer("allocator_slack"),
        breakdown_bytes=tuple((row.text("name"), row.integer("bytes")) for row in record.records("breakdown")),
        counts=_decode_counts(record),
        arena=_decode_arena(record),
        compiled=_decode_compiled(record, path),
        offload=record.text("offload", ""),
    )
    # The schedule of a compiled step may need more than its code.
    _check_offload(plan, path)
    _check_schedule(problem if plan.compiled is None else problem.with_budget(LARGEST_BYTES), plan.solution, path)
    _check_arena(plan, path)
    return plan


def _check_offload(plan: Plan, path: Path) -> None:
    if plan.compiled is None and bool(plan.offload) != has_copies(plan.problem.graph):
        there, missing = ("copies", "a place for them") if not plan.offload else ("a place for copies", "none")
        raise FileFormatError(f"{path} has {there} and {missing}; make the plan again.")


def _decode_counts(record: Record) -> BudgetScope:
    found = record.text("counts", BudgetScope.LIVE.value)
    if found not in tuple(BudgetScope):
        raise FileFormatError(f"{record.where}: `counts` is {found!r:.60}; it must be one of {', '.join(BudgetScope)}.")
    return BudgetScope(found)


def _decode_arena(record: Record) -> Arena | None:
    if record.fields.get("arena") is None:
        return None
    found = record.record("arena")
    return Arena(found.integer("block_bytes"), found.integer("height_bytes"), found.integers("offsets"))


def _encode_compiled(compiled: CompiledStep) -> dict[str, object]:
    return {
        "peak_bytes": compiled.peak_bytes,
        "time_ns": compiled.time_ns,
        "seen_ns": compiled.seen_ns,
        "cuts": [asdict(cut) for cut in compiled.cuts],
        "step": None if compiled.step is None else encode_profile(compiled.step),
        "scans": [asdict(scan) for scan in compiled.scans],
        "held": compiled.held,
    }


def _decode_compiled(record: Record, path: Path) -> CompiledStep | None:
    if record.fields.get("compiled") is None:
        return None
    found = record.record("compiled")
    cuts = tuple(
        CompiledCut(
            cut.texts("saved"),
            cut.flag("is_default"),
            cut.integers("loss_chunks"),
            cut.flag("has_copies"),
            cut.integer("away_bytes", 0),
        )
        for cut in found.records("cuts")
    )
    step = None if found.fields.get("step") is None else decode_profile(found.record("step"), path)
    return CompiledStep(
        peak_bytes=found.integer("peak_bytes"),
        time_ns=found.number("time_ns"),
        seen_ns=found.number("seen_ns", 0.0),
        cuts=cuts,
        step=step,
        scans=_decode_scans(found),
        held=found.flag("held", False),
    )


def _decode_scans(record: Record) -> tuple[PlannedScan, ...]:
    """None in files from before loops were planned."""
    if record.fields.get("scans") is None:
        return ()
    return tuple(
        PlannedScan(
            site=scan.integer("site"),
            differentiated=scan.integers("differentiated"),
            graph_hash=scan.text("graph_hash"),
            runs=tuple(ScanRun(run.integer("count"), run.integers("steps")) for run in scan.records("runs")),
            held=scan.flag("held"),
            extra_ns=scan.number("extra_ns", 0.0),
        )
        for scan in record.records("scans")
    )


def _encode_solution(solution: Solution) -> dict[str, object]:
    return {
        "status": solution.status.value,
        "schedule": None if solution.schedule is None else list(solution.schedule.steps),
        "time": solution.time_ns,
        "peak_bytes": solution.peak_bytes,
        "bound": solution.bound_ns,
        "min_budget_bytes": solution.min_budget_bytes,
        "solver": solution.solver,
        "reason": solution.reason,
    }


def _decode_solution(record: Record) -> Solution:
    status = record.text("status")
    if status not in Status.__members__:
        raise FileFormatError(
            f"{record.where}: `status` is {status!r:.60}; it must be one of {', '.join(Status.__members__)}."
        )
    return Solution(
        status=Status[status],
        schedule=_decode_schedule(record),
        time_ns=record.number("time"),
        peak_bytes=record.integer("peak_bytes"),
        bound_ns=record.number("bound"),
        min_budget_bytes=record.integer("min_budget_bytes"),
        solver=record.text("solver"),
        reason=record.text("reason", ""),
    )


def _decode_schedule(record: Record) -> Schedule | None:
    if record.fields.get("schedule") is None:
        return None
    return Schedule(tuple(OpId(step) for step in record.integers("schedule")))


def _encode_fingerprint(fingerprint: Fingerprint) -> dict[str, object]:
    return {
        "graph_hashes": list(fingerprint.graph_hashes),
        "torch_version": fingerprint.torch_version,
        "device": fingerprint.device,
        "shapes": list(fingerprint.shapes),
        "ranks": fingerprint.ranks,
    }


def _decode_fingerprint(record: Record) -> Fingerprint:
    return Fingerprint(
        graph_hashes=record.texts("graph_hashes"),
        torch_version=record.text("torch_version"),
        device=record.text("device"),
        shapes=record.texts("shapes"),
        ranks=record.integer("ranks", 1),
    )


def _check_schedule(problem: Problem, solution: Solution, path: Path) -> None:
    if (solution.schedule is None) != (solution.status is Status.INFEASIBLE):
        raise FileFormatError(
            f"{path} says {solution.status.value} but its schedule is "
            f"{'missing' if solution.schedule is None else 'there'}; make the plan again."
        )
    if solution.schedule is None:
        return
    try:
        peak = validate(problem, solution.schedule, keep_order=False)
    except InvalidSchedule as error:
        raise FileFormatError(f"{path} holds a schedule that is not valid: {error} Make the plan again.") from error
    time = simulate(problem, solution.schedule).time_ns
    if peak != solution.peak_bytes or not math.isclose(time, solution.time_ns, rel_tol=_TOLERANCE):
        raise FileFormatError(
            f"{path} records a peak of {solution.peak_bytes} bytes and time {solution.time_ns}, but its schedule has "
            f"{peak} and {time}; make the plan again."
        )
    if solution.bound_ns > time * (1 + _TOLERANCE):
        raise FileFormatError(f"{path} records a bound above the time of its own schedule; make the plan again.")


def _check_arena(plan: Plan, path: Path) -> None:
    # Addresses are the business of a folder that builds on this one.
    from remat.layout.arena import check_arena

    if plan.arena is None or plan.schedule is None:
        if plan.counts is BudgetScope.ARENA and plan.schedule is not None:
            raise FileFormatError(f"{path} counts the arena and has none; make the plan again.")
        return
    try:
        check_arena(plan.problem, plan.schedule, plan.arena)
    except InvalidLayout as error:
        raise FileFormatError(f"{path} holds an arena that is not valid: {error} Make the plan again.") from error
    if plan.counts is BudgetScope.ARENA and (plan.arena_bytes or 0) > plan.budget_bytes:
        raise FileFormatError(
            f"{path} holds an arena of {plan.arena_bytes} bytes, over its budget of {plan.budget_bytes}; "
            "make the plan again."
        )
