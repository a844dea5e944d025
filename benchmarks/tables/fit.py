"""Every lever together."""

from __future__ import annotations

from benchmarks.tables.made import GIB, MIB, gib, origin, read, stated, table


def fit_order() -> str:
    found = read("fit_order.json")
    rows = [
        (label, f"{ours / MIB:.2f}", f"{real / MIB:.2f}", f"{ours / real - 1:+.2%}")
        for label, ours, real in zip(found["labels"], found["predicted"], found["measured"], strict=True)
    ]
    told = f"{found['pairs']} pairs differ by more than 5 %; {len(found['wrong'])} are predicted in another order."
    header = "combination | predicted MiB | measured MiB | apart"
    return f"{origin('fit_order.json')}\n\n{table(header, rows)}\n\n{told}"


def fit_ladder() -> str:
    found = read("fit_ladder.json")
    rows = [
        (row["label"], f"{row['peak_bytes'] / GIB:.2f}", f"{1e3 * row['seconds_per_sample']:.2f}")
        for row in found["rows"]
    ]
    return f"{origin('fit_ladder.json')}\n\n{table('rung | predicted GiB | predicted ms per sample', rows)}"


def fit_timing() -> str:
    rows = [
        (name, f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['memory_bytes'] / GIB:.2f}", row["best"])
        for name, row in read("fit_timing.json").items()
    ]
    return stated("fit_timing.json", table("model | seconds: | of one core: | memory, GiB: | the fastest", rows))


def fit_largest() -> str:
    found = read("fit_largest.json")
    rows = [
        (
            name,
            str(found[name]["layers"]),
            f"{found[name]['parameters'] / 1e9:.2f}",
            gib(found[name]["predicted_bytes"]),
        )
        for name in ("plain", "every lever")
    ]
    told = f"{found['ratio']:.2f} times the parameters."
    header = "way | layers: | billion parameters: | predicted GiB:"
    return stated("fit_largest.json", f"{table(header, rows)}\n\n{told}")
