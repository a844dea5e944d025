"""Write the tables of the benchmarks page and of the README from `benchmarks/results/*.json`.

    python docs/write_benchmarks.py            # or: make docs-pages

In: pages with `<!-- table: NAME -->` … `<!-- end -->`. Out: the same pages, with what stands between the two made anew
from the results. Each table opens with what `runs.json` and its file record of date, machine, versions and
command. Words outside the
markers are written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")

sys.path.insert(0, str(ROOT))
from benchmarks.tables import fit, frontier, plans, ranks, steps  # noqa: E402
from benchmarks.tables.made import gib, mib  # noqa: E402

_MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str) -> str:
    """The page with every marked table made anew."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", page)


MODELS = (
    *("gpt2-medium", "resnet50", "bert-large", "llama-1b", "convnext-base"),
    *("deit-base", "mistral-half-billion", "modernbert-large", "bart-base"),
    *("regnet-y", "mixtral-small", "wav2vec2-base"),
)
TABLES: Mapping[str, Callable[[], str]] = {
    "distributed_sweep": ranks.distributed_sweep,
    "distributed_agreement": ranks.distributed_agreement,
    "distributed_growth": ranks.distributed_growth,
    "distributed_failures": ranks.distributed_failures,
    "distributed_pretended": ranks.distributed_pretended,
    "distributed_pipelines": ranks.distributed_pipelines,
    "distributed_bubbles": ranks.distributed_bubbles,
    "readme": frontier.readme,
    **{f"frontier_{model}": frontier.frontier(model) for model in MODELS},
    "largest_batch_gpt2-medium": frontier.largest_batch,
    "step_cpu": steps.step("step_cpu.json", mib, "MiB"),
    "step_cuda": steps.step("step_cuda.json", gib, "GiB"),
    "inplace_cpu": steps.inplace("inplace_cpu.json", ("order", "in place", "both", "0.9x")),
    "inplace_cpu_published": steps.inplace("inplace_cpu_published.json", ("both", "0.9x")),
    "solvers": plans.solvers,
    "planning": plans.planning,
    "depth": plans.depth,
    "first_steps": steps.first_steps,
    "bench_cpu": steps.classic,
    "profile": steps.profile,
    "estimate_cpu": steps.estimate("estimate_cpu.json"),
    "estimate_cuda": steps.estimate("estimate_cuda.json"),
    "report": plans.report,
    "reserved_cuda": frontier.reserved,
    "optimizer_offload_cuda": frontier.optimizer_offload,
    "offload_gpt2-medium": frontier.offload("gpt2-medium"),
    "layout": plans.layout,
    "plain_aarch64": steps.plain,
    "jax": steps.jax_losses,
    "compiled": frontier.compiled,
    "fit_order": fit.fit_order,
    "fit_ladder": fit.fit_ladder,
    "fit_timing": fit.fit_timing,
    "fit_largest": fit.fit_largest,
}
"""By name of their marker; all but the first and the last are also the names of their files."""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
