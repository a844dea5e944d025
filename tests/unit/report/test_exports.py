"""Every format a report is written in: what is in the file, and that others can read it."""

from __future__ import annotations

import html
import json
import pickle
import pickletools
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.reports import PLAN, curve, large_plan, measured

from remat import Plan
from remat.core.graph import Graph
from remat.core.results.profile import MemoryClass, Phase, StepProfile
from remat.errors import MissingExtra, UnknownName
from remat.report import FORMATS, gather, write_report
from remat.report.html import render
from remat.report.snapshot import snapshot
from remat.report.trace import trace

REPORT = gather(PLAN, curve(), name="small")
SOURCES = [(PLAN,), (measured(),), (measured(), measured()), (curve(),), (PLAN, curve()), (PLAN, measured())]


@pytest.mark.parametrize("sources", SOURCES, ids=lambda sources: "+".join(type(item).__name__ for item in sources))
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_format_takes_every_source(tmp_path: Path, form: Any, sources: Any) -> None:
    path = tmp_path / f"report{form.suffix}"
    if sources == (curve(),) and not form.shows_curves:
        with pytest.raises(UnknownName, match="add a plan or a profile"):
            write_report(path, *sources)
        return
    assert write_report(path, *sources) == path
    assert path.stat().st_size > 100


def test_kind_overrides_the_suffix(tmp_path: Path) -> None:
    assert b"<!doctype html>" in write_report(tmp_path / "page.txt", PLAN, kind="html").read_bytes()


@pytest.mark.parametrize(("name", "kind"), [("a.gif", ""), ("a.html", "gif")])
def test_unknown_format_lists_the_known_ones(tmp_path: Path, name: str, kind: str) -> None:
    with pytest.raises(UnknownName, match="html"):
        write_report(tmp_path / name, PLAN, kind=kind)


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"remat\[report\]"):
        write_report(tmp_path / "a.html", PLAN)
    assert not (tmp_path / "a.html").exists()


# ---- the page


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_page_refers_to_nothing_outside_itself() -> None:
    page = render(REPORT)
    ours = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert "http:" not in ours and "https:" not in ours
    assert re.findall(r'<(?:link|script|img)[^>]*(?:src|href)="(?!data:)', ours) == []
    assert "default-src 'none'" in page


def test_page_has_the_words_and_exact_bytes() -> None:
    page = render(REPORT)
    data = page_data(page)
    assert "small trains in" in page and "What fills the memory" in page
    for step, (_, known) in zip(data["steps"], REPORT.steps, strict=True):
        totals = [sum(parts) for parts in zip(*(line for _, line in step["bytes"]), strict=True)]
        assert totals[step["peak"]] == known.peak_bytes


def test_names_from_files_stay_text() -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    graph = PLAN.problem.graph
    ops = tuple(replace(op, module=evil, target=evil) for op in graph.ops)
    plan = replace(PLAN, problem=replace(PLAN.problem, graph=Graph(ops, graph.value_count, graph.outputs, evil)))
    page = render(gather(plan))
    assert evil not in page and "<img" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert html.escape(evil, quote=False) in page
    assert page_data(page)["name"] == evil
    assert evil not in plan._repr_html_()


def test_large_step_stays_under_six_megabytes() -> None:
    plan = large_plan()
    assert len(plan.problem.graph.ops) > 5000
    assert len(render(gather(plan, curve())).encode()) < 6_000_000


# ---- the trace


def events(kind: str) -> list[dict[str, Any]]:
    found = json.loads(json.dumps(trace(REPORT)))["traceEvents"]
    return [event for event in found if event["ph"] == kind]


def test_trace_has_a_slice_for_every_op_on_the_track_of_its_phase() -> None:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events("M") if event["name"] == "thread_name"
    }
    slices = events("X")
    assert len(slices) == sum(len(step.ops) for _, step in REPORT.steps)
    assert {names[event["pid"], event["tid"]] for event in slices} == {"forward", "recompute", "backward"}
    for event in slices:
        assert event["cat"] == names[event["pid"], event["tid"]]
        assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["name"], str)


def test_trace_slices_of_a_step_do_not_overlap() -> None:
    for process in (1, 2):
        slices = [event for event in events("X") if event["pid"] == process]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in zip(slices, slices[1:], strict=False))


def test_trace_counters_add_up_at_every_moment() -> None:
    for process, (_, step) in enumerate(REPORT.steps, start=1):
        counters = [event for event in events("C") if event["pid"] == process]
        totals = [event["args"]["bytes"] for event in counters if event["name"] == "memory"]
        classes = [
            event["args"]["bytes"] for event in counters if event["name"] in {kind.value for kind in MemoryClass}
        ]
        assert totals[:-1] == list(step.during_bytes)
        assert sum(totals) == sum(classes)
        assert totals[-1] < step.peak_bytes


# ---- the snapshot


def replayed(events: list[dict[str, Any]]) -> tuple[int, int]:
    """The peak and the end of a device's trace; fails where two live allocations overlap."""
    live: dict[int, int] = {}
    peak = total = 0
    for event in events:
        if event["action"] == "alloc":
            start, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or start >= other + size for other, size in live.items())
            live[start] = event["size"]
            total += event["size"]
            peak = max(peak, total)
        elif event["action"] == "free_completed":
            total -= live.pop(event["addr"])
    return peak, total


def test_snapshot_has_the_peaks_of_both_steps() -> None:
    found = snapshot(REPORT)
    for device, (_, step) in enumerate(REPORT.steps):
        peak, end = replayed(found["device_traces"][device])
        (segment,) = [segment for segment in found["segments"] if segment["device"] == device]
        assert peak == step.peak_bytes
        assert end == segment["active_size"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_snapshot_is_plain_data(tmp_path: Path) -> None:
    class Strict(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise AssertionError(f"{module}.{name}")

    with open(write_report(tmp_path / "a.pickle", PLAN), "rb") as file:
        assert set(Strict(file).load()) >= {"segments", "device_traces"}


def test_snapshot_has_only_what_the_page_can_unpickle(tmp_path: Path) -> None:
    known = {
        *(
            "PROTO",
            "FRAME",
            "STOP",
            "MARK",
            "MEMOIZE",
            "BINGET",
            "LONG_BINGET",
            "BININT",
            "BININT1",
            "BININT2",
            "LONG1",
        ),
        *("EMPTY_DICT", "EMPTY_LIST", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "SHORT_BINUNICODE", "BINUNICODE"),
        *("NEWFALSE", "NEWTRUE", "NONE", "TUPLE2", "EMPTY_TUPLE"),
    }
    content = write_report(tmp_path / "a.pickle", large_plan(4)).read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= known


def test_torch_reads_the_snapshot() -> None:
    pytest.importorskip("torch")
    from torch.cuda import _memory_viz as viz

    found = snapshot(REPORT)
    text = viz.trace(found)
    assert text.count("Device ") == 2 and "seg_0[" in text
    assert "allocated" in viz.segsum(found)
    assert len(viz.trace_plot(found)) > 1000 and len(viz.segment_plot(found)) > 1000
    assert "down" in viz.memory(found, format_flamegraph=lambda lines: lines)


# ---- numbers and notebooks


def test_json_holds_whole_profiles_that_load_again(tmp_path: Path) -> None:
    facts = json.loads(write_report(tmp_path / "a.json", PLAN, curve(), name="small").read_text())
    assert facts["format"] == "remat-report" and facts["summary"]["headline"].startswith("small trains")
    for found, (_, step) in zip(facts["steps"], REPORT.steps, strict=True):
        (tmp_path / "profile.json").write_text(json.dumps(found["profile"]))
        assert replace(StepProfile.load(tmp_path / "profile.json"), name=step.name) == step
        assert sum(found["peak"].values()) == found["peak_bytes"]
    assert len(facts["curve"]["points"]) == 2 and facts["modules"]


def test_replayed_phases_survive_the_file(tmp_path: Path) -> None:
    step = REPORT.steps[1][1]
    step.save(tmp_path / "after.json")
    assert Phase.RECOMPUTE in {op.phase for op in StepProfile.load(tmp_path / "after.json").ops}


@pytest.mark.parametrize("source", [PLAN, measured(), curve()], ids=lambda source: type(source).__name__)
def test_notebooks_show_a_small_fragment_without_scripts(source: Plan) -> None:
    fragment = source._repr_html_()
    assert fragment.startswith("<div") and "<script" not in fragment
    assert len(fragment) < 100_000


def test_to_html_writes_the_page(tmp_path: Path) -> None:
    for number, source in enumerate((PLAN, measured(), curve())):
        assert source.to_html(tmp_path / f"{number}").read_text().startswith("<!doctype html>")


def test_svg_is_stacked_by_class_for_both_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = write_report(tmp_path / "a.svg", PLAN, name="small").read_text()
    for words in ("Plain PyTorch", "With Remat", "budget", "activations", "recompute"):
        assert f"<!-- {words}" in picture
