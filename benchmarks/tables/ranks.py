"""Several ranks."""

from __future__ import annotations

from benchmarks.tables.made import MIB, read, stated, table


def distributed_sweep() -> str:
    rows = [
        [
            f"{row['model']}, {row['world']} ranks",
            row["how"],
            row["budget"],
            "yes" if row["bits_equal"] else "no",
            "yes" if row["within_budget"] else "no",
            "yes" if row["one_plan"] else "no",
            f"{row['largest_error_percent']:.2f} %",
            f"{row['overhead_percent']:.1f} %",
        ]
        for row in read("distributed_sweep.json")
    ]
    header = "model | engine | budget | equal bits | within | one plan | prediction off by: | overhead:"
    return stated("distributed_sweep.json", table(header, rows))


def distributed_agreement() -> str:
    found = read("distributed_agreement.json")
    seconds = max(found["seconds_of_8_processes"])
    named = max(item["seconds"] for items in found["told"].values() for item in items)
    same = all(len({item["told"] for item in items}) == 1 for items in found["told"].values())
    rows = [
        ["one plan on both ranks, cold caches of their own", f"{found['one_plan']} of {found['runs']} runs"],
        ["a rank that differs is named, the same on all four", f"{'yes' if same else 'no'}, within {named:.1f} s"],
        ["an agreement of 8 processes, without measuring and solving", f"{seconds:.2f} s"],
    ]
    return stated("distributed_agreement.json", table("what | found", rows))


def distributed_growth() -> str:
    found = read("distributed_growth.json")
    rows = [
        [
            f"{row['ranks']:,}",
            f"{row['exchanges']:,}",
            f"{row['of_the_first']:,}",
            str(row["most_of_another"]),
            f"{row['looks']:,}",
            f"{row['moved_bytes'] / MIB:.1f}",
            f"{row['seconds']:.2f}",
        ]
        for row in found["rows"]
    ]
    law = found["law"]["exchanges"]
    told = f"Fitted: {law['factor']:.1f} exchanges times ranks to the power of {law['power']:.2f}."
    header = "ranks: | exchanges: | of the first: | of another: | looks in vain: | moved MiB: | seconds:"
    return stated("distributed_growth.json", f"{table(header, rows)}\n\n{told}")


def distributed_failures() -> str:
    rows = [
        [row["how"], row["signal"], row["when"], row["rank 0"]["told"].split(":")[0], f"{row['rank 0']['seconds']:.1f}"]
        for row in read("distributed_failures.json")
    ]
    return stated(
        "distributed_failures.json", table("engine | signal to rank 1 | when | rank 0 raises | after, s:", rows)
    )


def distributed_pretended() -> str:
    rows = [
        [
            f"{row['model']}, {row['world']} ranks",
            row["engine"],
            *(str(row[name]) for name in ("predicted",)),
            *(str(min(row[name])) for name in ("planned_pretended", "planned_real", "plain_pretended", "plain_real")),
        ]
        for row in read("distributed_pretended.json")
    ]
    header = "model | engine | predicted: | planned, pretended: | planned, real: | plain, pretended: | plain, real:"
    return stated("distributed_pretended.json", table(header, rows))


def distributed_pipelines() -> str:
    rows = [
        [
            f"{row['kind']}, {row['world']} ranks, {row['micro_batches']} micro-batches",
            row["budget"],
            "; ".join(", ".join(map(str, rank.values())) for rank in row["in_flight"]),
            "yes" if row["equal"] else "no",
            "yes" if row["within_budget"] else "no",
            f"{row['largest_error_percent']:.2f} %",
            f"{row['runs'] - row['crashes']} of {row['runs']}",
        ]
        for row in read("distributed_pipelines.json")
    ]
    header = "schedule | budget | in flight, rank by rank | equal bits | within | prediction off by: | runs that ended:"
    return stated("distributed_pipelines.json", table(header, rows))


def distributed_bubbles() -> str:
    rows = [
        [
            f"{row['kind']}, {row['micro_batches']} micro-batches",
            row["budget"],
            f"{row['early_ms']['0']:.0f}",
            f"{1000 * row['unfilled_s']:.0f}",
            f"{1000 * row['filled_s']:.0f}",
            f"{1000 * row['gained_s']:.0f}",
            f"{row['predicted_unfilled_ms'] - row['predicted_filled_ms']:.0f}",
            f"{row['faster_rounds']} of {row['rounds']}",
        ]
        for row in read("distributed_bubbles.json")
    ]
    header = (
        "schedule | budget | can be early, ms: | not filled, ms: | filled, ms: | gained, ms: | predicted gain, ms: | "
        "faster rounds:"
    )
    return stated("distributed_bubbles.json", table(header, rows))
