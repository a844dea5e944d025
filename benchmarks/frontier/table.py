"""Results as Markdown: every configuration, then each of our budgets against the best peer that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.frontier.rows import Results, Row
from benchmarks.frontier.verdict import GIB, SMALLEST, Verdict, doubts, smallest_ours, verdict_on, verdicts


def markdown(results: Results) -> str:
    """The whole report of one model."""
    title = f"## {results.model}, batch {results.batch}, {results.device}, torch {results.torch_version}"
    parts = [title, *_rows_table(results), "", *_verdict_table(results), *_remarks(results)]
    return "\n".join(parts) + "\n"


def _rows_table(results: Results) -> Iterator[str]:
    heads = "step ms | predicted ms | peak GiB | predicted GiB | reserved GiB | ratio | ready in s | remarks"
    yield f"| configuration | {heads} |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---|"
    for row in results.rows:
        ratio = verdict_on(row, results.rows).ratio
        cells = (
            row.label,
            f"{row.step_ms:.1f}" if row.ran else "",
            _number(row.predicted_ms, 1),
            gib(row.peak_bytes),
            gib(row.predicted_bytes),
            gib(row.reserved_bytes),
            _number(ratio, 3),
            _number(row.prepare_s, 0),
            _remark(row),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "ratio: time over that of the fastest peer within the same budget or, for peers, the same peak."


def _verdict_table(results: Results) -> Iterator[str]:
    found = verdicts(results.model, results.rows)
    if not found:
        return
    yield "| ours | budget GiB | step ms | peak GiB | best peer that fits | its ms | ratio | bar | met |"
    yield "|---|---:|---:|---:|---|---:|---:|---:|---|"
    for item in found:
        yield f"| {' | '.join(_verdict_cells(item))} |"
    yield ""


def _verdict_cells(item: Verdict) -> Sequence[str]:
    row, peer = item.row, item.peer
    held = "" if item.holds_budget or not row.ran else " over budget"
    return (
        row.label,
        gib(row.budget_bytes),
        f"{row.step_ms:.1f}" if row.ran else row.status.value,
        gib(row.peak_bytes) + held,
        "none" if peer is None else peer.label,
        "" if peer is None else f"{peer.step_ms:.1f}",
        _number(item.ratio, 3),
        _number(item.bar, 2),
        {None: "", True: "yes", False: "no"}[item.met],
    )


def _remarks(results: Results) -> Iterator[str]:
    smallest = smallest_ours(results.rows)
    if smallest is not None:
        bar = SMALLEST.get(results.model)
        met = "" if bar is None else f"; the bar is {bar} GiB"
        yield f"Smallest peak that trained within its budget: {gib(smallest.peak_bytes)} GiB ({smallest.label}){met}."
    yield from (f"Doubt: {sentence}." for sentence in doubts(results.rows))


def _remark(row: Row) -> str:
    words = [] if row.ran else [f"{row.status.value}{': ' if row.reason else ''}{row.reason}"]
    if row.ran and row.graphs is not None and row.graphs > 1:
        words.append(f"{row.graphs} graphs")
    if row.ran and row.spread > 0.02:
        words.append(f"rounds {row.spread:.0%} apart")
    return ", ".join(words).replace("|", "/")


def gib(size_bytes: int | None) -> str:
    """Three digits below a GiB, as the tiny models need."""
    if size_bytes is None:
        return ""
    return f"{size_bytes / GIB:.2f}" if size_bytes >= GIB / 10 else f"{size_bytes / GIB:.5f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
