"""Every model of a suite at every batch.

In: a `Suite`. Out: a `Bench`; each state of it is told as soon as a batch is done, so that nothing is lost. A model's
largest batch comes first: where its schedules were found, those of the others are near.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from remat.bench.batch import Outcome, Watcher, run_batch
from remat.bench.suite import Subjects, Suite
from remat.core.cache_file import CACHE_VARIABLE
from remat.core.results.bench import Bench, Experiment
from remat.solvers.base import Solver


@dataclass(frozen=True, slots=True)
class Audience:
    """Whom to tell what, and whether to stop."""

    tell: Callable[[int, int, str], None] = lambda done, total, what: None
    """Called with how many batches are done, how many there are, and what comes next."""
    keep: Callable[[Bench], None] = lambda bench: None
    stop: Callable[[], bool] = lambda: False
    heeded_by: Callable[[Solver], Solver] = lambda solver: solver

    def watcher(self, done: int, total: int, name: str) -> Watcher:
        return Watcher(lambda what: self.tell(done, total, f"{name}: {what}"), self.stop, self.heeded_by)


@contextmanager
def costs_measured_anew() -> Iterator[None]:
    """While this lasts, nothing that was measured before, on a busier machine perhaps, is used, and nothing is left."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[CACHE_VARIABLE]
            os.environ.update({} if before is None else {CACHE_VARIABLE: before})


def run_bench(suite: Suite, device: str, seed: int, audience: Audience) -> Bench:
    """Run until all is done or the audience says stop."""
    bench = Bench(device, str(torch.__version__).split("+")[0], seed, ())
    tasks = suite.tasks()
    for done, (subjects, batch) in enumerate(tasks):
        if audience.stop():
            break
        watcher = audience.watcher(done, len(tasks), f"{subjects.model}, batch {batch}")
        bench = _with_batch(bench, suite, subjects, batch, watcher)
        audience.keep(bench)
    ran = sum(len(experiment.cases) for experiment in bench.experiments)
    if audience.stop() and ran < len(tasks):
        return replace(bench, skipped=(*bench.skipped, f"Stopped after {ran} of {len(tasks)} batches."))
    return bench


def _with_batch(bench: Bench, suite: Suite, subjects: Subjects, batch: int, watcher: Watcher) -> Bench:
    known = next((item for item in bench.experiments if item.model == subjects.model), None)
    guide = None if known is None else known.largest
    try:
        outcome = run_batch(subjects, batch, suite.effort, watcher, device=bench.device, seed=bench.seed, guide=guide)
    except torch.OutOfMemoryError:
        sentence = f"{subjects.model} at batch {batch} was left out: the device has too little memory for it."
        return replace(bench, skipped=(*bench.skipped, sentence))
    finally:
        # What this batch leaves in memory would be counted as the next one's.
        gc.collect()
        torch.cuda.empty_cache()
    if outcome is None:
        return bench
    changed = _extended(known, subjects, outcome)
    order = [item.model for item in suite.subjects]
    others = (item for item in bench.experiments if item.model != subjects.model)
    experiments = sorted((*others, changed), key=lambda item: order.index(item.model))
    return replace(bench, experiments=tuple(experiments))


def _extended(known: Experiment | None, subjects: Subjects, outcome: Outcome) -> Experiment:
    """With one more batch; the first, which is the largest, brings the curve."""
    if known is None:
        return Experiment(
            subjects.model, subjects.sizes, subjects.precision, (outcome.case,), outcome.curve, outcome.breakdowns
        )
    cases = sorted((*known.cases, outcome.case), key=lambda case: case.batch)
    return replace(known, cases=tuple(cases))
