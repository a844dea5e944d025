"""The largest batch that trains within a fixed amount of device memory: plain eager, compiled checkpointing, Remat.

    python -m benchmarks.frontier.largest_batch --model gpt2-medium --cap 40 --grain 2 --starts eager=8 ours=128
    python -m benchmarks.frontier.largest_batch --device cpu --model mlp-tiny --cap 0.01 --our-kernels eager

On CUDA the allocator of every process may take --cap GiB from the device and no more; on a CPU a batch fits where its
measured peak does. Every batch is tried in a process of its own; the largest waits and is timed at the end, alone. Ours
is given --our-share of the cap as its budget: what the allocator takes is more than what is in use. Into --output goes
largest_batch_MODEL.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.frontier.batches import largest_fit, next_batch, smallest_failure
from benchmarks.frontier.models import MODELS
from benchmarks.frontier.rows import Status
from benchmarks.frontier.verdict import GIB
from benchmarks.frontier.ways import Treatment, Way, ours, peers
from benchmarks.frontier.workers import Answer, Surroundings, Worker
from benchmarks.runs import note_run

from remat.core.document import write_document

FORMAT, VERSION = "remat-largest-batch", 1
TOO_LARGE = (Status.OUT_OF_MEMORY, Status.INFEASIBLE)
OURS = "ours"
TIMES_EAGER, TIMES_CHECKPOINT, THROUGHPUT = 10.0, 1.4, 0.97
"""The bars for ours: its batch over both, and its throughput over that of compiled checkpointing."""
TIMING_S = 20.0
"""What timing one way at the end is expected to take."""


@dataclass(frozen=True, slots=True)
class Found:
    """One way: the batches that were tried, with their peaks or None, and the largest one timed."""

    name: str
    label: str
    tried: dict[int, int | None] = field(default_factory=dict)
    remark: str = ""
    step_ms: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def batch(self) -> int | None:
        return largest_fit(self.tried)

    @property
    def per_second(self) -> float | None:
        """Sequences or images."""
        return None if self.batch is None or self.step_ms is None else 1e3 * self.batch / self.step_ms


@dataclass(frozen=True, slots=True)
class Conditions:
    model: str
    device: str
    cap_bytes: int
    grain: int
    steps: int
    deadline: float
    surroundings: Surroundings

    def tried(self, way: Way, batch: int) -> tuple[Answer, Worker | None]:
        """What a fresh process says about this batch; where it can train, the process waits to be timed."""
        if self.deadline <= time.monotonic():
            return Answer(None, Status.NOT_REACHED, "the time was over"), None
        request = {
            "model": self.model,
            "way": asdict(way),
            "device": self.device,
            "batch": batch,
            "cap_bytes": self.cap_bytes,
        }
        worker = Worker(request, f"{self.model}-{way.name}-{batch}", self.surroundings)
        answer = worker.ready(self.deadline - time.monotonic())
        if answer.fields is not None:
            answer = worker.time(1, self.deadline - time.monotonic())
        if self.peak_within(answer) is not None:
            return answer, worker
        worker.end()
        return answer, None

    def peak_within(self, answer: Answer) -> int | None:
        """Its peak where it fits."""
        if answer.fields is None or answer.fields["peak_bytes"] > self.cap_bytes:
            return None
        return int(answer.fields["peak_bytes"])


@dataclass(slots=True)
class Candidate:
    """One way under search, with the process that trains its largest batch so far."""

    way: Way
    found: Found
    worker: Worker | None = None

    def take(self, worker: Worker | None) -> None:
        if worker is not None:
            self.end()
            self.worker = worker

    def end(self) -> None:
        if self.worker is not None:
            self.worker.end()
            self.worker = None


def search(candidate: Candidate, start: int, conditions: Conditions, keep: Callable[[Found], None]) -> Found:
    """Try batches until the largest is known, the time is over or something else than memory fails."""
    way, found = candidate.way, candidate.found
    while True:
        batch = next_batch(found.tried, start=start, grain=conditions.grain, cap_bytes=conditions.cap_bytes)
        if batch is None:
            return replace(found, remark="" if found.batch else "no batch fits")
        answer, worker = conditions.tried(way, batch)
        candidate.take(worker)
        if answer.fields is None and answer.status not in TOO_LARGE:
            return replace(found, remark=f"stopped at {batch}: {answer.status}: {answer.reason}")
        peak = conditions.peak_within(answer)
        found = replace(found, tried={**found.tried, batch: peak})
        _tell(f"{way.name}: batch {batch} {'does not fit' if peak is None else f'fits, {peak / GIB:.2f} GiB'}")
        keep(found)


def timed(candidate: Candidate, conditions: Conditions) -> Found:
    """The largest batch, timed with nothing else running."""
    found = candidate.found
    if candidate.worker is None:
        return found
    answer = candidate.worker.time(conditions.steps, conditions.deadline - time.monotonic())
    if answer.fields is None:
        return replace(found, remark=f"not timed: {answer.status}: {answer.reason}")
    facts = answer.fields
    return replace(
        found,
        step_ms=statistics.median(facts["step_ms"]),
        peak_bytes=facts["peak_bytes"],
        reserved_bytes=facts["reserved_bytes"],
    )


def table(found: list[Found]) -> Iterator[str]:
    """Markdown, and a line for each bar."""
    yield "| configuration | largest batch | that failed | step ms | per second | peak GiB | reserved GiB | remarks |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    for item in found:
        cells = (
            item.label,
            _shown(item.batch),
            _shown(smallest_failure(item.tried)),
            _shown(item.step_ms),
            _shown(item.per_second),
            _shown(None if item.peak_bytes is None else item.peak_bytes / GIB),
            _shown(None if item.reserved_bytes is None else item.reserved_bytes / GIB),
            item.remark,
        )
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield from bars(found)


def bars(found: list[Found]) -> Iterator[str]:
    """Ours over the best of the others, where both are known."""
    mine = next((item for item in found if item.name.startswith(OURS)), None)
    eager = _best(found, "eager", lambda item: item.batch)
    checkpointed = _best(found, "compile-block", lambda item: item.batch)
    for other, words, value, bar in (
        (eager, "batch over eager's", lambda item: item.batch, TIMES_EAGER),
        (checkpointed, "batch over compiled checkpointing's", lambda item: item.batch, TIMES_CHECKPOINT),
        (checkpointed, "throughput over compiled checkpointing's", lambda item: item.per_second, THROUGHPUT),
    ):
        if mine is not None and other is not None and value(mine) and value(other):
            ratio = value(mine) / value(other)
            yield f"{words}: {ratio:.2f}, bar {bar}: {'met' if ratio >= bar else 'not met'}"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    path = options.output / f"largest_batch_{options.model}.json"
    options.output.mkdir(parents=True, exist_ok=True)
    cap = int(options.cap * GIB)
    conditions = Conditions(
        options.model,
        options.device,
        cap,
        options.grain,
        options.steps,
        time.monotonic() + options.limit_s,
        Surroundings(options.cache, options.cache / "logs", options.compile_threads, options.allocator),
    )
    ways = _ways(options, cap)
    # What was found has to be timed, too.
    reserve = min(TIMING_S * len(ways), 0.25 * options.limit_s)
    searching = replace(conditions, deadline=conditions.deadline - reserve)
    candidates = {way.name: Candidate(way, Found(way.name, way.label)) for way in ways}

    def keep(item: Found) -> None:
        candidates[item.name].found = item
        _save(path, conditions, [candidate.found for candidate in candidates.values()])

    def searched(candidate: Candidate) -> None:
        start = options.starts.get(candidate.way.name.split("-")[0], options.start)
        keep(search(candidate, start, searching, keep))

    with ExitStack() as stack:
        for candidate in candidates.values():
            stack.callback(candidate.end)
        with ThreadPoolExecutor(max_workers=options.jobs) as pool:
            list(pool.map(searched, candidates.values()))
        for candidate in candidates.values():
            keep(timed(candidate, conditions))
    print("\n".join(table([candidate.found for candidate in candidates.values()])))
    return 0


def _ways(options: argparse.Namespace, cap_bytes: int) -> list[Way]:
    known = {way.name: way for way in peers(list(Treatment))}
    budget = f"{int(options.our_share * cap_bytes)}"
    (mine,) = ours([f"{budget}B"], compiled=options.our_kernels == "compiled", search_s=options.search)
    mine = replace(
        mine.treated(Treatment(options.our_treatment)),
        name=OURS,
        label=f"Remat, {options.our_share:.0%} of the memory as budget",
    )
    return [*(known[name] for name in options.peers), mine]


def _save(path: Path, conditions: Conditions, found: Sequence[Found]) -> None:
    name = torch.cuda.get_device_name() if conditions.device == "cuda" else "CPU"
    ways = [_encoded(item) for item in found]
    facts = {"model": conditions.model, "device": name, "torch_version": torch.__version__}
    sizes = {"cap_bytes": conditions.cap_bytes, "grain": conditions.grain}
    write_document(path, {"format": FORMAT, "version": VERSION, **facts, **sizes, "ways": ways})
    note_run(path, facts["device"])


def _encoded(found: Found) -> dict[str, Any]:
    tried = [{"batch": batch, "fits": peak is not None, "peak_bytes": peak or 0} for batch, peak in found.tried.items()]
    return {**asdict(found), "tried": tried, "batch": found.batch, "per_second": found.per_second}


def _best(found: list[Found], prefix: str, value: Callable[[Found], float | None]) -> Found | None:
    named = [item for item in found if item.name.startswith(prefix) and value(item)]
    return max(named, key=lambda item: value(item) or 0.0, default=None)


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def _start_of(text: str) -> tuple[str, int]:
    name, _, batch = text.partition("=")
    return name, int(batch)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    has_gpu = torch.cuda.is_available()
    names = [way.name for way in peers(list(Treatment))]
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    add("--model", choices=list(MODELS), default="gpt2-medium" if has_gpu else "gpt2-tiny")
    add("--cap", type=float, default=40.0, help="GiB")
    add("--peers", nargs="*", choices=names, default=["eager", "compile-block"])
    add("--our-kernels", choices=("compiled", "eager"), default="compiled")
    add("--our-treatment", choices=[item.value for item in Treatment], default="plain")
    add("--our-share", type=float, default=0.95)
    add("--search", type=float, metavar="SECONDS", help="let ours search by measurement for that long")
    add("--start", type=int, default=8, help="the first batch to try")
    add("--starts", nargs="*", type=_start_of, default=[], metavar="NAME=BATCH", help="eager=, compile= or ours=")
    add("--grain", type=int, default=1, help="how exactly the largest batch is to be known")
    add("--jobs", type=int, default=3, help="ways that are searched at a time")
    add("--compile-threads", type=int, default=4)
    add("--steps", type=int, default=8)
    add("--allocator", default="", help="PYTORCH_CUDA_ALLOC_CONF for all, such as expandable_segments:True")
    add("--limit-s", type=float, default=1e6)
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "remat-frontier")
    add("--output", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args(arguments)
    options.starts = dict(options.starts)
    return options


if __name__ == "__main__":
    sys.exit(main())
