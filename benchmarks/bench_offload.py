"""Keep, compute again or copy to the host: the step time that copies save, beside recomputation alone and torch's own.

    python -m benchmarks.bench_offload                      GPT-2 medium: compiled at 7.83 and 5 GiB, then eager at 0.3x
    python -m benchmarks.bench_offload --models llama-1b --compiled 12GiB --eager --limit-s 200
    python -m benchmarks.bench_offload --models gpt2-tiny --device cpu --compiled 0.6x --eager 0.6x

For each model and budget: Remat with recomputation alone and with `offload="cpu"`; beside them the plain step, and for
eager kernels torch's `save_on_cpu(pin_memory=True)` at whatever peak it takes. Each way has a process of its own
(`frontier`); once the link has been measured, all get ready side by side, and then take their timed steps in turn, with
the device to themselves. A row is printed whenever something of it is known, and the file is written anew: what is
known when --limit-s is over stays. For eager kernels the gradients of the first step are compared bit by bit with
plain's.

`--trace FILE` does nothing but write a Chrome trace of one offloaded eager step, in which copies lie beside kernels.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from benchmarks.frontier.campaign import Campaign, Settings
from benchmarks.frontier.models import MODELS
from benchmarks.frontier.rows import Results, Row, save_results
from benchmarks.frontier.trial import WARM_UP, Request, opened
from benchmarks.frontier.ways import Way
from benchmarks.frontier.workers import Surroundings

from remat.core.budget import format_bytes

RESULTS = Path(__file__).parent / "results"


def ways(budgets: Sequence[str], limit_s: float, *, compiled: bool) -> list[Way]:
    """All that is compared for one kind of kernels: ours in pairs, without and with copies."""
    kind = "compile" if compiled else "eager"
    found = [Way(kind, f"{kind}, plain", compiled)]
    if not compiled:
        found.append(Way("save-on-cpu", "eager, save_on_cpu", saves_on_host=True))
    for text in budgets:
        for offload, words in ((None, "Remat"), ("cpu", "Remat, offload")):
            name = f"{kind}-{text}{'-offload' if offload else ''}"
            label = f"{kind}, {words}, {text}"
            found.append(Way(name, label, compiled, budget=text, offload=offload, time_limit_s=limit_s))
    return found


def line(row: Row, rows: Sequence[Row]) -> str:
    """What is known of a row."""
    if not row.ran:
        predicted = f", predicted {format_bytes(row.predicted_bytes)}" if row.predicted_bytes is not None else ""
        ready = f" (ready in {row.prepare_s:.0f} s{predicted})" if row.prepare_s is not None else ""
        return f"{row.label:36} {row.status}: {row.reason}{ready}"
    pair = next((item for item in rows if item.name == row.name.removesuffix("-offload") and item.ran), None)
    ratio = f"{row.step_ms / pair.step_ms:7.3f}" if pair is not None and pair is not row else f"{'':7}"
    expected = f"{row.predicted_ms:8.1f}" if row.predicted_ms is not None else f"{'':8}"
    gap = f"{row.gap:6.1%}" if row.gap is not None else f"{'':6}"
    figures = f"{row.step_ms:8.1f} {expected} {ratio} {_bytes(row.peak_bytes):>10} {_bytes(row.predicted_bytes):>10}"
    waited = f"{row.waited_ms:.1f}" if row.waited_ms is not None else ""
    host = f"{row.copies or '':>6} {_bytes(row.host_bytes):>10} {waited:>6}"
    return f"{row.label:36} {figures} {gap} {host} {row.prepare_s or 0:6.0f} {_bits(row, rows)}"


def _bytes(count: int | None) -> str:
    return format_bytes(count) if count is not None else ""


def _bits(row: Row, rows: Sequence[Row]) -> str:
    """Whether gradients are plain eager's, bit by bit."""
    plain = next((item.digest for item in rows if item.name == "eager"), None)
    if row.digest is None or plain is None or row.name == "eager":
        return ""
    return "same" if row.digest == plain else "DIFFER"


def keeper(path: Path, say: Callable[[str], None]) -> Callable[[Results], None]:
    """Saves results, and tells each row that has changed."""
    known: dict[str, Row] = {}

    def keep(results: Results) -> None:
        save_results(results, path)
        for row in results.rows:
            if known.get(row.name) != row:
                known[row.name] = row
                say(line(row, results.rows))

    return keep


def campaign(model: str, asked: argparse.Namespace, deadline: float) -> Campaign:
    on = torch.cuda.get_device_name() if asked.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    surroundings = Surroundings(asked.cache, asked.cache / "logs", asked.compile_threads)
    caches = "warm" if surroundings.are_warm else "cold"
    batch = asked.batch or MODELS[model].batch
    settings = Settings(
        device=asked.device,
        batch=batch,
        jobs=asked.jobs,
        our_jobs=asked.jobs,
        parked=99,
        steps=asked.steps,
        rounds=asked.rounds,
        deadline=deadline,
        prepare_limit_s=asked.limit_s,
        surroundings=surroundings,
        with_digest=True,
    )
    keep = keeper(asked.output / f"offload_{model}.json", lambda text: print(text, flush=True))
    return Campaign(Results(model, batch, on, torch.__version__, caches), settings, keep, lambda what: None)


def measure_link(asked: argparse.Namespace) -> None:
    """While nobody else uses it; those who plan find it in the cache."""
    code = (
        "import torch; from remat.pytorch.host.shared import link_to; "
        f"print(link_to('cpu', torch.device('{asked.device}', 0)))"
    )
    environment = Surroundings(asked.cache, asked.cache / "logs").environment()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def write_trace(model: str, budget: str, asked: argparse.Namespace) -> None:
    way = Way("trace", "", budget=budget, offload="cpu", time_limit_s=asked.time_limit)
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if asked.device == "cuda" else []
    with opened(Request(model, way, asked.device, asked.batch)) as trial:
        for _ in range(WARM_UP):
            trial.step()
        with torch.profiler.profile(activities=activities) as profiler:
            trial.step()
            trial.park()
    profiler.export_chrome_trace(str(asked.trace))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(MODELS), default=["gpt2-medium"])
    add("--batch", type=int, help="another batch size than the model's own")
    add("--compiled", nargs="*", default=["7.83GiB", "5GiB"], help="budgets of compiled steps")
    add("--eager", nargs="*", default=["0.3x"], help="budgets of eager steps")
    add("--steps", type=int, default=6, help="timed steps of a round")
    add("--rounds", type=int, default=2)
    add("--time-limit", type=float, default=15.0, help="of each plan, in seconds")
    add("--limit-s", type=float, default=200.0, help="of everything; what is known by then stays")
    add("--jobs", type=int, default=6, help="ways that get ready at a time")
    add("--compile-threads", type=int, default=3, help="of each")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--trace", type=Path)
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "remat-frontier")
    add("--output", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    asked = options(arguments)
    if asked.trace is not None:
        write_trace(asked.models[0], asked.eager[0], asked)
        return
    # A plain kill ends the processes of the ways, too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + asked.limit_s
    measure_link(asked)
    heads = f"{'step ms':>8} {'expected':>8} {'ratio':>7} {'peak':>10} {'predicted':>10} {'gap':>6} {'copies':>6}"
    for model in asked.models:
        print(f"{model:36} {heads} {'on host':>10} {'waits':>6} {'ready':>6} bits", flush=True)
        kinds = (asked.compiled, True), (asked.eager, False)
        wanted = [way for some, compiled in kinds if some for way in ways(some, asked.time_limit, compiled=compiled)]
        campaign(model, asked, deadline).run(wanted)


if __name__ == "__main__":
    main()
