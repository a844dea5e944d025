"""Every peer and Remat in one run: time of a training step against its peak memory.

    python -m benchmarks.frontier --models gpt2-medium --budgets 21.2 14.6 12 10 7.83 6.5 5
    python -m benchmarks.frontier --models regnet-y deit-base --together
    python -m benchmarks.frontier --device cpu --models mlp-tiny --budgets 0.7x --only eager compile 'ours*'

Each configuration has a process of its own. They get ready side by side (most of that is compilation, which stays in
--cache for the next run); then each is timed with the device to itself, in --rounds turns. A configuration that runs
out of memory or fails is a row that says so. Into --output go, for each model, frontier_MODEL.json, .md, .png and .svg.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.frontier.campaign import Campaign, Settings
from benchmarks.frontier.models import MODELS
from benchmarks.frontier.picture import draw_frontier
from benchmarks.frontier.rows import Results, Row, Status, load_results, save_results
from benchmarks.frontier.table import markdown
from benchmarks.frontier.verdict import budgets_by_peers
from benchmarks.frontier.ways import Treatment, Way, ours, peers, selected
from benchmarks.frontier.workers import Surroundings

GPU_MODELS = ("gpt2-medium", "resnet50", "bert-large", "llama-1b")
CPU_MODELS = ("gpt2-tiny", "resnet-tiny", "bert-tiny", "llama-tiny")
BUDGETS: Mapping[str, Sequence[str]] = {
    "gpt2-medium": ("21.2", "14.6", "12", "10", "7.83", "6.5", "5"),
    "resnet50": ("3.35", "2.6"),
    "bert-large": ("12", "9", "6.5"),
    "llama-1b": ("17", "13.6", "12", "11"),
    **dict.fromkeys((*CPU_MODELS, "mlp-tiny"), ("0.7x", "0.5x", "0.35x")),
}
TREATMENTS = {"bert-large": ("plain", "eager-masks"), "bert-tiny": ("plain", "eager-masks")}
"""Where it is not `ALIKE`: Remat leaves out BERT's masks as eager does, so its peers may, too."""
ALIKE = ("plain", "one-graph")
WITHOUT_MASKS = ("resnet50", "resnet-tiny", "mlp-tiny")
"""Models that need no treatment."""


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    # A plain kill ends the workers, too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    deadline = time.monotonic() + options.limit_s
    options.output.mkdir(parents=True, exist_ok=True)
    planned = {model: _campaign(model, options, deadline) for model in options.models}
    if options.together:
        _run_together(planned, options)
    else:
        # Peers come first: their peaks are our budgets where none are given.
        for model, campaign in planned.items():
            for is_ours in (False, True):
                campaign.run(_missing(model, campaign.results.rows, options, is_ours))
                report(campaign.results, options.output)
    for campaign in planned.values():
        print(report(campaign.results, options.output), flush=True)
    return 0


def _run_together(planned: dict[str, Campaign], options: argparse.Namespace) -> None:
    """All models get ready at the same time; then all are timed, one by one."""
    with ExitStack() as stack:
        for campaign in planned.values():
            stack.callback(campaign.end)
        with ThreadPoolExecutor(max_workers=len(planned)) as pool:
            waiting = [pool.submit(_get_ready, model, campaign, options) for model, campaign in planned.items()]
            for item in waiting:
                item.result()
        for campaign in planned.values():
            campaign.time()
            report(campaign.results, options.output)


def _get_ready(model: str, campaign: Campaign, options: argparse.Namespace) -> None:
    """Ours beside the peers where budgets are given, and else as soon as the peers' peaks are known."""
    theirs = _missing(model, campaign.results.rows, options, is_ours=False)
    if options.budgets or model in BUDGETS:
        campaign.prepare([*theirs, *_missing(model, campaign.results.rows, options, is_ours=True)])
        return
    campaign.prepare(theirs)
    measured = [row for row in campaign.results.rows if row.ran]
    campaign.prepare(_missing(model, [*measured, *campaign.looked_at()], options, is_ours=True))


def _missing(model: str, rows: Sequence[Row], options: argparse.Namespace, is_ours: bool) -> list[Way]:
    ways = selected(_ours(model, rows, options) if is_ours else _peers(model, options), options.only, options.skip)
    done = {row.name for row in rows}
    return [way for way in ways if way.name not in done]


def _campaign(model: str, options: argparse.Namespace, deadline: float) -> Campaign:
    path = options.output / f"frontier_{model}.json"
    surroundings = Surroundings(options.cache, options.cache / "logs", options.compile_threads)
    results = _beginning(model, path, options, surroundings)
    settings = Settings(
        device=options.device,
        batch=results.batch,
        jobs=options.jobs,
        our_jobs=options.our_jobs,
        parked=options.parked or MODELS[model].parked,
        steps=options.steps,
        rounds=options.rounds,
        deadline=deadline,
        prepare_limit_s=options.prepare_limit_s,
        surroundings=surroundings,
        to_time=sum(_count(name, options) for name in options.models) if options.together else 0,
    )
    return Campaign(results, settings, lambda found: save_results(found, path), lambda what: _tell(f"{model} {what}"))


def _count(model: str, options: argparse.Namespace) -> int:
    """About how many configurations there will be; those that are known to be the same are left out later."""
    theirs = selected(_peers(model, options), options.only, options.skip)
    return len(theirs) + len(options.budgets or BUDGETS.get(model) or range(len(theirs) + 2))


def report(results: Results, folder: Path) -> str:
    """The tables, which are written beside the picture."""
    text = markdown(results)
    (folder / f"frontier_{results.model}.md").write_text(text)
    for suffix in ("png", "svg"):
        draw_frontier(results, folder / f"frontier_{results.model}.{suffix}")
    return text


def _beginning(model: str, path: Path, options: argparse.Namespace, surroundings: Surroundings) -> Results:
    """Nothing, or with --resume the rows of the last run that need not be measured again."""
    if options.resume and path.is_file():
        found = load_results(path)
        kept = tuple(row for row in found.rows if row.status is not Status.NOT_REACHED)
        return replace(found, rows=kept)
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    caches = "warm" if surroundings.are_warm else "cold"
    return Results(model, options.batch or MODELS[model].batch, name, torch.__version__, caches)


def _ours(model: str, rows: Sequence[Row], options: argparse.Namespace) -> list[Way]:
    budgets = options.budgets or BUDGETS.get(model) or budgets_by_peers(rows, timed=not options.together)
    mine = ours(budgets, search_s=options.search)
    if options.eager_kernels:
        mine += ours(budgets, compiled=False)
    treatment = "plain" if model in WITHOUT_MASKS else options.our_treatment
    return [way.treated(Treatment(treatment)) for way in mine]


def _peers(model: str, options: argparse.Namespace) -> list[Way]:
    treatments = options.treatments or TREATMENTS.get(model, ALIKE)
    return peers([Treatment(name) for name in (("plain",) if model in WITHOUT_MASKS else treatments)])


def _tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    treatments = [item.value for item in Treatment]
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    add("--models", nargs="+", choices=list(MODELS), default=list(GPU_MODELS if has_gpu else CPU_MODELS))
    add("--batch", type=int, help="another batch size than the model's own")
    add("--budgets", nargs="+", default=[], help='ours: GiB, or "900MiB", "0.5x"; the peers\' peaks where none is set')
    add("--search", type=float, metavar="SECONDS", help="let ours search by measurement for that long")
    add("--eager-kernels", action="store_true", help="ours also without a compiler")
    add("--treatments", nargs="+", choices=treatments, default=[], help="of compiled peers; each is a row")
    add("--our-treatment", choices=treatments, default="plain")
    add(
        "--together",
        action="store_true",
        help="all models get ready at a time and are timed after that",
    )
    add("--only", nargs="+", default=[], metavar="NAME", help="patterns of configurations, such as 'compile*'")
    add("--skip", nargs="+", default=[], metavar="NAME")
    add("--jobs", type=int, default=8 if has_gpu else 1, help="peers that get ready at a time")
    add("--our-jobs", type=int, default=1, help="ours that get ready at a time: they measure kernels meanwhile")
    add("--parked", type=int, help="processes that wait at a time, each with the parameters on the device")
    add("--compile-threads", type=int, default=2)
    add("--steps", type=int, default=8, help="timed steps of a round")
    add("--rounds", type=int, default=2)
    add("--limit-s", type=float, default=1e6, help="what is measured by then is reported")
    add("--prepare-limit-s", type=float, default=400.0, help="for each configuration")
    add("--resume", action="store_true", help="keep the rows of the last run in --output and measure the others")
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "remat-frontier")
    add("--output", type=Path, default=Path(__file__).parents[1] / "results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
