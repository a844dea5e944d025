"""Ranks that are killed or stopped before, while and after they plan: what the others are told, and when."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.many_ranks import run_ranks
from benchmarks.ranks.models import RESULTS, built
from benchmarks.runs import save_results


def add_to(modes: Any) -> None:
    found = modes.add_parser("failures")
    found.add_argument("--timeout", type=float, default=10.0)
    found.add_argument("--hows", default="ddp inside,fsdp free outside")
    found.set_defaults(run=failures)


def failures(options: argparse.Namespace) -> None:
    rows = []
    for how in options.hows.split(","):
        cases = ((name, when) for when in ("step", "before planning", "planning") for name in ("SIGKILL", "SIGSTOP"))
        for signal_name, when in cases:
            asked = how, signal_name, when
            found = run_ranks(failing, *asked, world=2, timeout_s=options.timeout, wait_s=120, awaited=[0])
            rows.append(
                {"how": how, "signal": signal_name, "when": when, "timeout_s": options.timeout, "rank 0": found[0]}
            )
            print(rows[-1], flush=True)
    save_results(RESULTS / "distributed_failures.json", rows)


def failing(rank: int, how: str, signal_name: str, when: str) -> dict[str, Any]:
    """Rank 1 gets a signal in the middle of a step, or while ranks plan; the others tell what they saw, and when."""
    import os
    import signal
    import threading

    import torch

    import remat
    from remat import zoo

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    example = zoo.build("gpt", depth=3, dropout=0.0)
    model = built(how, example.model, "0.7x")
    began = time.time()
    path = Path(os.environ["REMAT_CACHE_DIR"]).parent / "signalled"

    def hit() -> None:
        path.write_text(str(time.time()))
        os.kill(os.getpid(), getattr(signal, signal_name))

    try:
        for number in range(6):
            if rank == 1 and number == (4 if when == "step" else 0):
                threading.Timer({"step": 0.05, "before planning": 0.0, "planning": 3.0}[when], hit).start()
                if when == "before planning":
                    time.sleep(2)
            model(*example.args).backward()
            model.zero_grad()
    except (RuntimeError, remat.RematError) as error:
        since = time.time() - (float(path.read_text()) if path.exists() else began)
        return {"told": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}", "seconds": round(since, 2)}
    return {"told": "", "seconds": -1.0}
