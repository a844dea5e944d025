"""Solving, layouts and reports: what needs no device."""

from __future__ import annotations

import statistics

from benchmarks.tables.made import mib, percent, read, stated, table


def solvers() -> str:
    name = "solvers.json"
    found = read(name)
    rows = [
        (
            row["instance"],
            f"{row['ops']:,}",
            f"{row['share']:.2f}",
            row["status"],
            percent(row["overhead"], 2),
            percent(row["bound"], 2),
            percent(row["gap"], 2),
            "" if row["first_s"] is None else f"{row['first_s']:.2f}",
            f"{row['seconds']:.1f}",
        )
        for row in found["rows"]
    ]
    header = "graph | ops: | budget, of plain: | status | overhead: | bound: | gap: | first schedule s: | seconds:"
    return stated(name, f"Time limit {found['time_limit_s']:g} s, solver `auto`.\n\n{table(header, rows)}")


def planning() -> str:
    name = "planning.json"
    found = read(name)
    what = {"cold": "capture, profile and plan", "warm": "capture and plan, costs known", "capture": "capture alone"}
    rows = [
        (words, f"{found[key]['ops']:,}", f"{found[key]['seconds']:.1f}", f"{found[key]['extra_memory_gib']:.2f}")
        for key, words in what.items()
    ]
    return stated(name, table("what | ops: | seconds: | memory beyond the model's GiB:", rows))


def depth() -> str:
    name = "depth.json"
    rows = [
        (
            f"{row['kind']} {row['size']:,}",
            row["budget"],
            f"{row['ops']:,}",
            f"{row['cpu_s']:.0f}",
            f"{row['cpu_seconds']['solve']:.0f}",
            f"{row['process_gib']:.1f}",
            percent(row["overhead"], 1),
            percent(row["gap"], 2),
            {True: "yes", False: "no"}.get(row.get("same_bits"), ""),
        )
        for row in read(name)
    ]
    header = "model | budget | ops: | CPU s: | of it solving: | GiB: | overhead: | gap: | equal bits trained"
    return stated(name, table(header, rows))


def report() -> str:
    name = "report.json"
    found = read(name)
    row = (
        f"{found['ops']:,}",
        f"{found['bytes'] / 1e6:.1f}",
        f"{found['write_s']:.2f}",
        f"{statistics.median(found['first_ms']) / 1000:.2f}",
        f"{statistics.median(found['all_ms']) / 1000:.2f}",
    )
    return stated(name, table("ops: | file MB: | written in s: | first chart after s: | all charts after s:", [row]))


def layout() -> str:
    name = "layout.json"
    rows = [
        (
            row["step"],
            row["schedule"],
            f"{row['buffers']:,}",
            mib(row["load_bytes"]),
            percent(row["over_load"], 2),
            percent(row["first_fit_over_load"], 1),
            f"{row['seconds']:.1f}",
        )
        for row in read(name)
    ]
    header = "step | schedule | buffers: | load MiB: | arena above load: | first fit above load: | seconds:"
    return stated(name, table(header, rows))
