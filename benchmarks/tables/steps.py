"""One device, eager: steps, estimates, profiles and plain peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.tables.made import mib, percent, read, stated, table


def step(name: str, unit: Callable[[float | None], str], title: str) -> Callable[[], str]:
    def make() -> str:
        rows = [
            (
                row["model"],
                "plain eager, against itself" if row["variant"] == "plain eager" else row["variant"],
                f"{row['step_ms']:.1f}",
                f"{row['ratio']:.3f}",
                unit(row["peak_bytes"]),
                unit(row["predicted_bytes"]),
                unit(row["budget_bytes"]) if row["variant"].endswith("x") else "",
                percent(row["gap"], 2),
                "yes" if row["same_loss"] else "no",
            )
            for row in read(name)
        ]
        header = f"model | variant | step ms: | over plain: | peak {title}: | predicted: | budget: | gap: | same loss"
        return stated(name, table(header, rows))

    return make


def inplace(name: str, ways: Sequence[str]) -> Callable[[], str]:
    def make() -> str:
        rows = []
        for model in read(name):
            by_way = {row["way"]: row for row in model["rows"]}
            cells = [percent(by_way[way]["saved"]) if way in by_way else "" for way in ways]
            again = percent(by_way["0.9x"]["recomputed"]) if "0.9x" in by_way else ""
            rows.append((model["model"], mib(model["plain_bytes"]), *cells, percent(1 - model["limit"]), again))
        columns = " | ".join(f"saved, {way}:" for way in ways)
        header = f"model | plain peak MiB: | {columns} | most that every op once allows: | recomputed at 0.9x:"
        return stated(name, table(header, rows))

    return make


def first_steps() -> str:
    name = "first_steps.json"
    rows = [
        (
            row["model"],
            f"{row['ops']:,}",
            *(f"{seconds:.1f}" for seconds in (row["capture_s"], row["ours_s"], row["ours_s"] - row["capture_s"])),
        )
        for row in read(name)
    ]
    return stated(name, table("model | ops: | capture s: | ours s: | beyond capture s:", rows))


def classic() -> str:
    name = "bench_cpu.json"
    found = read(name)
    rows = []
    for summary in found["summary"]:
        experiment = next(each for each in found["experiments"] if each["model"] == summary["model"])
        case = next(each for each in experiment["cases"] if each["batch"] == summary["batch"])
        overheads = {(trial["way"], trial["limit"]): trial for trial in case["trials"]}
        for saved in summary["saved"]:
            trial = overheads.get((saved["way"], saved["limit"]))
            within = "" if saved["limit"] is None else f" within {100 * saved['limit']:g} %"
            rows.append(
                (
                    f"{summary['model']}, batch {summary['batch']}",
                    f"{saved['way']}{within}",
                    percent(saved["peak_measured"]),
                    percent(trial["predicted"]["overhead"]) if trial else "",
                    percent(trial["measured"]["overhead"]) if trial else "",
                )
            )
    return stated(name, table("model | way | saved of the peak: | overhead predicted: | measured:", rows))


def profile() -> str:
    name = "profile.json"
    rows = [
        (
            model,
            f"{row['ops']:,}",
            f"{row.get('plain_s', row.get('step_s')):.2f}",
            f"{row['ratio']:.2f}" if "ratio" in row else "",
            f"{row.get('whole_ratio') or row['profile_s'] / row['step_s']:.2f}",
        )
        for model, row in read(name).items()
    ]
    header = "model | ops: | plain step s: | followed step over plain: | whole profile over plain:"
    return stated(name, table(header, rows))


def estimate(name: str) -> Callable[[], str]:
    def make() -> str:
        rows = [
            (
                row["model"],
                row["scale"],
                row["amp"],
                row["how"],
                mib(row["estimated_bytes"]),
                mib(row["measured_bytes"]),
                f"{100 * row['error']:+.3f} %",
                f"{row['estimate_seconds']:.1f}",
            )
            for row in read(name)
            if row.get("measured_bytes")
        ]
        header = "model | scale | precision | how | estimated MiB: | measured MiB: | apart: | seconds:"
        return stated(name, table(header, rows))

    return make


def plain() -> str:
    """Two columns of differences, one for each number of threads; "" where a model was not run with it."""
    name = "plain_aarch64.json"
    threads = sorted({row["threads"] for row in read(name)["rows"]})
    by_model: dict[str, dict[int, Any]] = {}
    for row in read(name)["rows"]:
        by_model.setdefault(row["model"], {})[row["threads"]] = row
    rows = [
        (model, str(next(iter(found.values()))["graphs"]), *(_apart(found.get(count)) for count in threads))
        for model, found in by_model.items()
    ]
    columns = " | ".join(f"{count} thread{'s' if count > 1 else ''}:" for count in threads)
    return stated(name, table(f"model | graphs: | {columns}", rows))


def _apart(row: Any) -> str:
    if row is None:
        return ""
    return f"{mib(row['measured_bytes'])} MiB, {100 * (row['taken_bytes'] / row['measured_bytes'] - 1):+.2f} %"


def jax_losses() -> str:
    rows = [
        (
            row["case"],
            row["way"],
            f"{row['budget_mib']:.2f}" if row["budget_mib"] else "",
            f"{row['temporary_mib']:.2f}",
            percent(row["temporary_mib"] / row["budget_mib"]) if row["budget_mib"] else "",
            f"{1e3 * row['seconds']:.1f}",
            str(row["compilations"] or ""),
            f"{row['difference']:.0e}" if row["budget_mib"] else "",
        )
        for row in read("jax.json")
    ]
    header = "model | way | budget MiB: | temporaries MiB: | used: | step ms: | compilations: | gradients differ by:"
    return stated("jax.json", table(header, rows))
