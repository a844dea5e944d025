from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract import graphs
from tests.unit.core.plans import small_plan

from remat.core import Plan, Solution, Status, graph_hash
from remat.core.results.plan import CompiledCut, CompiledStep, PlannedScan, ScanRun
from remat.errors import FileFormatError

PLAN = small_plan()


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    return path, json.loads(path.read_text())


def test_round_trips_a_plan(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    assert Plan.load(path) == PLAN


def test_round_trips_an_infeasible_plan(tmp_path: Path) -> None:
    solution = Solution(Status.INFEASIBLE, None, 5.0, 90, 4.0, 90, "auto", "No schedule fits this budget.")
    plan = replace(PLAN, solution=solution)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_round_trips_the_plan_of_a_compiled_step(tmp_path: Path) -> None:
    cuts = (CompiledCut(("mm", "tanh"), loss_chunks=(4,), has_copies=True), CompiledCut(is_default=True))
    plan = replace(PLAN, compiled=CompiledStep(7, 2.5, cuts))
    seen = replace(PLAN, compiled=CompiledStep(7, 2.5, cuts, seen_ns=3.5))
    for item in (plan, seen):
        item.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == item
    assert (plan.predicted_peak, plan.predicted_time) == (7, 2.5)
    assert seen.predicted_time == 3.5


def test_reads_compiled_plans_of_before_steps_were_held_and_loops_had_a_price(tmp_path: Path) -> None:
    scans = (PlannedScan(0, (1,), "abc", (ScanRun(2, (0, 1)),), held=True),)
    plan = replace(PLAN, compiled=CompiledStep(7, 2.5, (CompiledCut(("mm",)),), scans=scans))
    path = tmp_path / "plan.json"
    plan.save(path)
    fields = json.loads(path.read_text())
    del fields["compiled"]["held"], fields["compiled"]["seen_ns"], fields["compiled"]["scans"][0]["extra_ns"]
    path.write_text(json.dumps(fields))
    assert Plan.load(path) == plan


def test_a_cut_that_names_no_values_is_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    replace(PLAN, compiled=CompiledStep(7, 2.5, (CompiledCut(),))).save(path)
    fields = json.loads(path.read_text())
    fields["compiled"]["cuts"][0]["saved"] = [3]
    path.write_text(json.dumps(fields))
    with pytest.raises(FileFormatError, match="saved"):
        Plan.load(path)


def test_saving_leaves_no_other_file_behind(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    PLAN.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path, before = saved(tmp_path)
    broken = replace(PLAN, solution=replace(PLAN.solution, time_ns=float("nan")))
    with pytest.raises(ValueError, match="JSON compliant"):
        broken.save(path)
    assert json.loads(path.read_text()) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("section", "field", "wrong"),
    [
        ("solution", "peak_bytes", 1),
        ("solution", "time", 1.0),
        ("solution", "bound", 1e18),
        ("solution", "status", "PERFECT"),
        ("solution", "status", "INFEASIBLE"),
        ("solution", "schedule", None),
        ("solution", "schedule", [0, 1]),
        ("solution", "schedule", [10**6]),
        ("solution", "schedule", ["0"]),
        ("solution", "solver", None),
        ("problem", "budget_bytes", 1),
        ("problem", "sizes", [1]),
        ("problem", "outputs", [10**6]),
        ("fingerprint", "graph_hashes", [1]),
        ("fingerprint", "device", 0),
    ],
)
def test_refuses_a_changed_field(tmp_path: Path, section: str, field: str, wrong: object) -> None:
    path, document = saved(tmp_path)
    document[section][field] = wrong
    path.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"plan\.json") as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


def test_refuses_a_truncated_file_and_a_later_version(tmp_path: Path) -> None:
    path, document = saved(tmp_path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(FileFormatError, match="cut short"):
        Plan.load(path)
    path.write_text(json.dumps({**document, "version": 99}))
    with pytest.raises(FileFormatError, match="version 99"):
        Plan.load(path)


def test_graph_hash_ignores_names_and_times_but_not_sizes_and_flags() -> None:
    problem = graphs.chain(3)
    graph, sizes = problem.graph, problem.costs.size_bytes
    renamed = replace(graph, name="x", ops=tuple(replace(op, name="y", module="z") for op in graph.ops))
    pinned = replace(graph, ops=(replace(graph.ops[0], recomputable=False), *graph.ops[1:]))
    assert graph_hash(graph, sizes) == graph_hash(renamed, sizes)
    assert graph_hash(graph, sizes) != graph_hash(pinned, sizes)
    assert graph_hash(graph, sizes) != graph_hash(graph, (sizes[0] + 1, *sizes[1:]))
    assert len(graph_hash(graph, sizes)) == 64


def test_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"Cannot write .*check the folder"):
        PLAN.save(tmp_path / "nowhere" / "plan.json")
