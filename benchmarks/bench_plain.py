"""What "1x" is taken to be against the measured peak of the plain step: zoo models and models of transformers.

    python -m benchmarks.bench_plain [--models zoo-gpt,transformers-bert] [--threads 1,2] [--scale tiny]

Each model is measured once, fresh, in plain eager: every allocation and free of forward and backward. Another copy is
planned without a limit, and says what it takes the plain peak to be; nothing of the measurement is known to it.
Writes `results/plain_<architecture>.json` and `.md`, row by row; rows of earlier runs stay until they are run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.runs import save_results
from benchmarks.small_transformers import SMALL_TRANSFORMERS, build_small_transformer

import remat
from remat import zoo
from remat.core.budget import format_bytes
from remat.pytorch.measure.measure_step import measure_once
from remat.zoo import Example

MODELS = (*(f"zoo-{name}" for name in zoo.REGISTRY), *(f"transformers-{name}" for name in SMALL_TRANSFORMERS))
CLOSE = 0.02
MOST_STEPS = 4
UNLIMITED = 2**50
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    threads: int
    measured_bytes: int
    taken_bytes: int
    """What "1x" is."""
    graphs: int
    seconds: float
    """Capturing, measuring ops and the first steps."""

    @property
    def difference(self) -> float:
        return self.taken_bytes / self.measured_bytes - 1


def build(name: str, scale: str) -> Example:
    kind, _, short = name.partition("-")
    example = zoo.build(short, scale=scale) if kind == "zoo" else build_small_transformer(short)
    example.model.train()
    return example


def measured_bytes(example: Example) -> int:
    return measure_once(example.model, *example.args, **example.kwargs).peak_bytes


def compare(name: str, threads: int, scale: str) -> Row:
    measured = measured_bytes(build(name, scale))
    gc.collect()
    example = build(name, scale)
    step = remat.optimize(example.model, UNLIMITED, solver="none", progress=False)
    session = remat.pytorch.run.optimize.session_of(step)
    start = time.perf_counter()
    for _ in range(MOST_STEPS):
        outputs = step(*example.args, **example.kwargs)
        (outputs if isinstance(outputs, torch.Tensor) else outputs.loss).backward()
        del outputs
        example.model.zero_grad()
        if session.plan is not None:
            break
    seconds = time.perf_counter() - start
    taken = remat.plan_of(step).plain_peak_bytes
    return Row(name, threads, measured, taken, len(session.graphs), seconds)


def table(rows: Sequence[Row]) -> str:
    lines = ['| model | threads | measured plain peak | "1x" | difference | graphs | seconds |']
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        sizes = f"{format_bytes(row.measured_bytes)} | {format_bytes(row.taken_bytes)} | {100 * row.difference:+.2f} %"
        lines.append(f"| {row.model} | {row.threads} | {sizes} | {row.graphs} | {row.seconds:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--scale", default="tiny", choices=zoo.SCALES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[Row] = []
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for name in options.models.split(","):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows.append(compare(name, threads, options.scale))
            torch.compiler.reset()
            gc.collect()
            print(table(rows[-1:]).split("\n")[-1], flush=True)
            save(rows[-1], options.output / f"plain_{platform.machine()}", options.scale)
    print(summary(rows))


def summary(rows: Sequence[Row]) -> str:
    far = [row for row in rows if abs(row.difference) > CLOSE]
    most = 100 * max(abs(row.difference) for row in rows)
    return f"{len(rows)} rows, {len(far)} more than {100 * CLOSE:.0f} % off; the largest difference is {most:.2f} %."


def save(new: Row, target: Path, scale: str) -> None:
    """Add a row to what earlier runs found, in the place of theirs."""
    path = target.with_suffix(".json")
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(item["model"], item["threads"]): Row(**item) for item in found} | {(new.model, new.threads): new}
    listed = sorted(rows.values(), key=lambda row: (MODELS.index(row.model), row.threads))
    place = f'{platform.machine()}, torch {torch.__version__.split("+")[0]}, zoo models at "{scale}" size'
    save_results(path, {"place": place, "rows": [asdict(row) for row in listed]})
    title = f'"1x" against the measured plain peak ({place}), forward and backward.'
    target.with_suffix(".md").write_text(f"{title}\n\n{table(listed)}\n\n{summary(listed)}\n")


if __name__ == "__main__":
    main()
