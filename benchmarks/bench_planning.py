"""How long planning takes, cold and warm: a 24-layer GPT-2, captured, profiled and planned without being run.

    python -m benchmarks.bench_planning [--layers 24] [--width 1024] [--batch 4] [--length 256] [--budget 0.5x]

Each figure comes from a process of its own: cold with an empty cost cache, warm with a filled one. "capture" is the
warm time with nothing to solve (an unlimited budget); what planning adds is the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.runs import save_results


def measure_once(options: argparse.Namespace, budget: str) -> dict[str, float]:
    """Plan in this process and say how long it took and how much memory it needed beyond the model's own."""
    import torch
    import transformers

    import remat

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=options.width, n_layer=options.layers, n_head=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (options.batch, options.length))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    plan = remat.plan(model, input_ids=tokens, labels=tokens, budget=budget)
    return {
        "seconds": time.perf_counter() - start,
        "extra_memory_gib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20,
        "ops": len(plan.problem.graph.ops),
        "overhead": plan.overhead,
        "gap": plan.gap,
        "plain_peak_gib": plan.plain_peak_bytes / 2**30,
        "predicted_peak_gib": plan.predicted_peak / 2**30,
    }


def in_own_process(budget: str, cache: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_planning", *sys.argv[1:], "--once", budget]
    environment = {**os.environ, "REMAT_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--budget", default="0.5x")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--once", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure_once(options, options.once)))
        return
    with tempfile.TemporaryDirectory() as cache:
        cold = in_own_process(options.budget, cache)
        warm = in_own_process(options.budget, cache)
        capture = in_own_process("50x", cache)
    print(f"{cold['ops']:.0f} ops")
    print(f"plain peak {cold['plain_peak_gib']:.2f} GiB, planned {cold['predicted_peak_gib']:.2f} GiB")
    print(f"overhead {warm['overhead']:.2%}, proven gap {warm['gap']:.3%}")
    print(f"cold: capture + profile + plan   {cold['seconds']:6.1f} s")
    print(f"warm: capture + plan             {warm['seconds']:6.1f} s")
    print(f"warm: capture alone              {capture['seconds']:6.1f} s")
    print(f"planning adds                    {warm['seconds'] - capture['seconds']:6.1f} s")
    print(f"memory of planning               {cold['extra_memory_gib']:6.2f} GiB")
    save_results(options.output / "planning.json", {"cold": cold, "warm": warm, "capture": capture})


if __name__ == "__main__":
    main()
