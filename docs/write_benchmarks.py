"""Write the tables of the benchmarks page and of the README from `benchmarks/results/*.json`.

    python docs/write_benchmarks.py            # or: make docs-pages

In: pages with `<!-- table: NAME -->` … `<!-- end -->`. Out: the same pages, with what stands between the two made anew
from the results. Each table opens with what `runs.json` and its file record of date, machine, versions and
command. Words outside the
markers are written by hand.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")

sys.path.insert(0, str(ROOT))
from benchmarks.frontier.rows import Results, load_results  # noqa: E402
from benchmarks.frontier.verdict import GIB, verdicts  # noqa: E402
from benchmarks.runs import read_runs  # noqa: E402

MIB = 2**20
README_MODEL = "gpt2-medium"
MISSING = "not recorded"
RECORDED: Mapping[str, tuple[str, ...]] = {
    "date": ("date", "measured_on"),
    "machine": ("machine", "place", "device"),
    "torch": ("torch", "torch_version"),
    "command": ("command",),
}
"""What a reader wants to know of a run, and the fields in which a results file may say it."""
_MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page with every marked table made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def origin(name: str) -> str:
    """One line on where a file's figures come from."""
    found = read(name)
    fields = {**(found if isinstance(found, dict) else {}), **read_runs(RESULTS).get(name, {})}
    said = []
    for title, keys in RECORDED.items():
        told = next((str(fields[key]) for key in keys if fields.get(key)), MISSING)
        said.append(f"{title}: {f'`{told}`' if title == 'command' and told != MISSING else told}")
    return f"`{name}` · {' · '.join(said)}"


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """`header` has a name for each column; one that ends in ":" is a column of numbers."""
    names = [name.strip() for name in header.split("|")]
    lines = [
        f"| {' | '.join(name.removesuffix(':') for name in names)} |",
        f"|{'|'.join('---:' if name.endswith(':') else '---' for name in names)}|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def stated(name: str, body: str) -> str:
    return f"{origin(name)}\n\n{body}"


def mib(size: float | None) -> str:
    return "" if size is None else f"{size / MIB:.1f}"


def gib(size: float | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{digits}f} %"


def plain_label(label: str) -> str:
    """All rows of a model are helped past masks in the same way, so its label need not say so."""
    return label.removesuffix(", eager masks").removesuffix(", one graph")


def readme() -> str:
    """A few budgets of the model that the README shows."""
    results = load_results(RESULTS / f"frontier_{README_MODEL}.json")
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
        results = load_results(RESULTS / name)
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


def compiled() -> str:
    """A result that has no JSON: the table as its benchmark wrote it."""
    lines = (RESULTS / "compiled.md").read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


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
    rows = [[str(row["ranks"]), f"{row['seconds']:.2f}"] for row in found["rows"]]
    law = f"{1e3 * found['law']['factor_s']:.1f} ms times ranks to the power of {found['law']['power']:.2f}."
    return stated("distributed_growth.json", f"{table('ranks: | seconds:', rows)}\n\nFitted: {law}")


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


TABLES: Mapping[str, Callable[[], str]] = {
    "distributed_sweep": distributed_sweep,
    "distributed_agreement": distributed_agreement,
    "distributed_growth": distributed_growth,
    "distributed_failures": distributed_failures,
    "distributed_pretended": distributed_pretended,
    "distributed_pipelines": distributed_pipelines,
    "readme": readme,
    **{f"frontier_{model}": frontier(model) for model in ("gpt2-medium", "resnet50", "bert-large", "llama-1b")},
    "largest_batch_gpt2-medium": largest_batch,
    "step_cpu": step("step_cpu.json", mib, "MiB"),
    "step_cuda": step("step_cuda.json", gib, "GiB"),
    "inplace_cpu": inplace("inplace_cpu.json", ("order", "in place", "both", "0.9x")),
    "inplace_cpu_published": inplace("inplace_cpu_published.json", ("both", "0.9x")),
    "solvers": solvers,
    "planning": planning,
    "first_steps": first_steps,
    "bench_cpu": classic,
    "profile": profile,
    "estimate_cpu": estimate("estimate_cpu.json"),
    "estimate_cuda": estimate("estimate_cuda.json"),
    "report": report,
    "reserved_cuda": reserved,
    "optimizer_offload_cuda": optimizer_offload,
    "layout": layout,
    "plain_aarch64": plain,
    "jax": jax_losses,
    "compiled": compiled,
    "fit_order": fit_order,
    "fit_ladder": fit_ladder,
    "fit_timing": fit_timing,
    "fit_largest": fit_largest,
}
"""By name of their marker; all but the first and the last are also the names of their files."""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
