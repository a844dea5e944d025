"""Compiled training beside its peers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.frontier.rows import Results, load_results
from benchmarks.frontier.verdict import verdicts
from benchmarks.tables import made
from benchmarks.tables.made import GIB, gib, percent, plain_label, read, read_text, stated, table

README_MODEL = "gpt2-medium"


def readme() -> str:
    """A few budgets of the model that the README shows."""
    results = load_frontier(f"frontier_{README_MODEL}.json")
    rows = []
    for item in verdicts(results.model, results.rows):
        peer = item.peer
        rows.append(
            (
                f"{item.row.budget_bytes / GIB:g} GiB",
                "nothing fits" if peer is None else plain_label(peer.label).replace("compile", "torch.compile", 1),
                "" if peer is None else f"{peer.step_ms:.1f} ms",
                f"{item.row.step_ms:.1f} ms",
                "" if item.ratio is None else f"{item.ratio:.2f}",
            )
        )
    return table("budget | fastest peer within it | its step: | Remat: | ratio:", rows)


def frontier(model: str) -> Callable[[], str]:
    name = f"frontier_{model}.json"

    def make() -> str:
        results = load_frontier(name)
        return stated(name, f"{_ways(results)}\n\n{_against(results)}")

    return make


def _ways(results: Results) -> str:
    rows = [
        (
            plain_label(row.label),
            f"{row.step_ms:.1f}" if row.ran else row.status.value,
            gib(row.peak_bytes),
            gib(row.predicted_bytes),
            gib(row.reserved_bytes),
            f"{row.prepare_s:.0f}" if row.prepare_s is not None else "",
            percent(row.spread, 0) if row.ran else "",
        )
        for row in results.rows
    ]
    header = "way | step ms: | peak GiB: | predicted GiB: | reserved GiB: | ready after s: | rounds apart:"
    return table(header, rows)


def _against(results: Results) -> str:
    rows = [
        (
            gib(item.row.budget_bytes),
            f"{item.row.step_ms:.1f}",
            gib(item.row.peak_bytes),
            "nothing fits" if item.peer is None else plain_label(item.peer.label),
            "" if item.peer is None else f"{item.peer.step_ms:.1f}",
            "" if item.ratio is None else f"{item.ratio:.3f}",
        )
        for item in verdicts(results.model, results.rows)
        if item.row.ran
    ]
    return table("budget GiB: | Remat ms: | its peak GiB: | fastest peer that fits | its ms: | ratio:", rows)


def largest_batch() -> str:
    name = "largest_batch_gpt2-medium.json"
    found = read(name)
    rows = [
        (
            plain_label(way["label"]),
            str(way["batch"]),
            str(min((t["batch"] for t in way["tried"] if not t["fits"]), default="")),
            gib(way["peak_bytes"]),
            f"{way['step_ms']:.0f}",
            f"{way['per_second']:.0f}",
        )
        for way in found["ways"]
    ]
    header = "way | largest batch: | smallest that failed: | peak GiB: | step ms: | sequences a second:"
    return stated(name, f"Within {found['cap_bytes'] / GIB:g} GiB of the device:\n\n{table(header, rows)}")


def compiled() -> str:
    """A result that has no JSON: the table as its benchmark wrote it."""
    lines = read_text("compiled.md").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def reserved() -> str:
    name = "reserved_cuda.json"
    rows = [
        (
            row["step"],
            gib(row["predicted_bytes"]),
            gib(row["peak_bytes"]),
            gib(row["reserved_bytes"]),
            f"{row['reserved_bytes'] / row['predicted_bytes']:.3f}",
            f"{row['step_ms']:.0f}",
        )
        for row in read(name)["rows"]
    ]
    header = "step | predicted GiB: | peak GiB: | reserved GiB: | reserved over predicted: | step ms:"
    return stated(name, table(header, rows))


def optimizer_offload() -> str:
    name = "optimizer_offload_cuda.json"
    rows = [
        (
            row["way"],
            f"{row['parameters'] / 1e9:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['step_ms']:,.0f}",
            f"{row['optimizer_ms']:,.0f}",
            gib(row["peak_bytes"]),
            gib(row["reserved_bytes"]),
            gib(row["host_bytes"]),
        )
        for row in read(name)["rows"]
        if "failure" not in row
    ]
    header = "way | 1e9 parameters: | tokens/s: | step ms: | optimizer ms: | peak GiB: | reserved GiB: | host GiB:"
    return stated(name, table(header, rows))


def offload(model: str) -> Callable[[], str]:
    """Plans with copies, each beside the one without under the same budget."""
    name = f"offload_{model}.json"

    def make() -> str:
        rows = load_frontier(name).rows
        alone = {row.name: row for row in rows if row.ran}
        cells = []
        for row in rows:
            pair = alone.get(row.name.removesuffix("-offload"))
            ratio = f"{row.step_ms / pair.step_ms:.3f}" if row.ran and pair is not None and pair is not row else ""
            cells.append(
                (
                    row.label,
                    f"{row.step_ms:.1f}" if row.ran else row.status.value,
                    ratio,
                    gib(row.peak_bytes),
                    gib(row.predicted_bytes),
                    gib(row.host_bytes),
                    f"{row.prepare_s:.0f}" if row.prepare_s is not None else "",
                )
            )
        header = "way | step ms: | without copies = 1: | peak GiB: | predicted GiB: | on host GiB: | ready after s:"
        return stated(name, table(header, cells))

    return make


def load_frontier(name: str) -> Results:
    return load_results(made.RESULTS / name)
