"""Cases in, comparisons out, in processes of their own: one that dies or hangs is a result like any other."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

Result = dict[str, Any]
"""What `Comparison.as_json` makes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What workers are told once."""

    device: str = "cpu"
    compiler: str | None = None
    timeout_s: float = 120.0


class Worker:
    """One process and the case it is at."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seed: int | None = None
        self.is_done = False
        """Whether it can take no more cases."""
        self.began = 0.0
        self._is_warm = False
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, request), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, seed: int) -> None:
        self.seed, self.began = seed, time.monotonic()
        self.pipe.send(seed)

    def take(self) -> Result:
        """What has come, or what became of the process."""
        assert self.seed is not None
        try:
            result = self.pipe.recv()
            self._is_warm, self.is_done = True, result.pop("is_last")
        except (EOFError, ConnectionError):
            self.process.join()
            result = lost(self, "crash", f"the process ended with {self.process.exitcode}")
            self.is_done = True
        self.seed = None
        return result

    def is_late(self) -> bool:
        # A first case waits for imports as well.
        extra = 0.0 if self._is_warm else 60.0
        return self.seed is not None and time.monotonic() - self.began > self.request.timeout_s + extra

    def stop(self) -> None:
        """Let it end by itself where it waits for a case, and not otherwise."""
        self.pipe.close()
        if self.seed is None:
            self.process.join(10)
        self.process.kill()
        self.process.join()


def lost(worker: Worker, verdict: str, details: str) -> Result:
    """The result of a case that sent none."""
    from tests.fuzz.modules import make_case

    assert worker.seed is not None
    case = make_case(worker.seed, on_cuda=worker.request.device == "cuda")
    seconds = round(time.monotonic() - worker.began, 3)
    return {"seed": case.seed, "case": case.describe(), "verdict": verdict, "details": details, "seconds": seconds} | {
        "trials": [],
        "eager_bytes": 0,
    }


def run_cases(seeds: Iterable[int], jobs: int, request: Request, end: float = float("inf")) -> Iterator[Result]:
    """Results as they come; no new case begins after the moment `end` of the monotonic clock."""
    waiting = iter(seeds)
    workers = [Worker(request) for _ in range(jobs)]
    try:
        busy = [worker for worker in workers if _next(worker, waiting, end)]
        while busy:
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            still: list[Worker] = []
            for worker in busy:
                if worker.pipe in ready:
                    yield worker.take()
                elif worker.is_late():
                    yield lost(worker, "timeout", f"not done after {request.timeout_s:.0f} s")
                    worker.is_done = True
                else:
                    still.append(worker)
                    continue
                if worker.is_done:
                    workers.remove(worker)
                    worker.stop()
                    worker = Worker(request)
                    workers.append(worker)
                if _next(worker, waiting, end):
                    still.append(worker)
            busy = still
    finally:
        for worker in workers:
            worker.stop()


def _next(worker: Worker, waiting: Iterator[int], end: float) -> bool:
    """Whether there was one more case to give."""
    if time.monotonic() > end:
        return False
    seed = next(waiting, None)
    if seed is None:
        return False
    worker.give(seed)
    return True


def serve(pipe: Connection, request: Request) -> None:
    """In a worker: compare the case of each seed that comes."""
    faulthandler.enable()
    warm_up(request)
    from tests.fuzz.compare import Settings, compare
    from tests.fuzz.modules import make_case

    settings = Settings(request.device, request.compiler)
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        result = compare(make_case(seed, on_cuda=request.device == "cuda"), settings).as_json()
        # After a failed assertion on the device nothing runs there any more in this process.
        result["is_last"] = "CUDA error" in result["details"]
        pipe.send(result)
        gc.freeze()


def warm_up(request: Request) -> None:
    """Import everything a case needs and take it out of the collector's sight: optimizers are looked for there."""
    import logging

    import torch
    from tests.fuzz.compare import Settings, compare
    from tests.fuzz.modules import Case
    from tests.fuzz.parts import Sizes

    logging.getLogger("torch").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    if request.device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    case = Case(0, Sizes(8, 5, 24), (("feed forward", 1), ("linear", 1)))
    compare(replace(case, loss_inside=False), Settings(request.device, request.compiler))
    gc.collect()
    gc.freeze()
