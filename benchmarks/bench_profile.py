"""What profiling a step costs on a CPU: the followed step beside the plain one, taken in turns in one process.

    python -m benchmarks.bench_profile [--models gpt,resnet50] [--rounds 5] [--layers 24] [--width 1024]

"followed" is the step itself while it is followed, "whole" everything up to the finished profile; both are set against
the plain step. The last line is `remat.profile` of a GPT-2 of 24 layers from `transformers`, warm-up and clock
included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.runs import save_results

import remat
from remat import zoo
from remat.pytorch.measure.profile_step import follow_call
from remat.pytorch.measure.training_step import TrainingStep


def compare(name: str, rounds: int) -> dict[str, float]:
    """Median seconds of a plain and a followed step of a zoo model at "demo" size."""
    example = zoo.build(name, scale="demo")
    optimizer = torch.optim.AdamW(example.model.parameters())
    step = TrainingStep(example.model, example.args, dict(example.kwargs), optimizer)
    step()
    rows = [taken(step, name) for _ in range(rounds)]
    return {
        "ops": rows[0].ops,
        "plain_s": statistics.median(row.plain_s for row in rows),
        "followed_s": statistics.median(row.followed_s for row in rows),
        "ratio": statistics.median(row.followed_s / row.plain_s for row in rows),
        "whole_ratio": statistics.median(row.whole_s / row.plain_s for row in rows),
    }


def gpt2(layers: int, width: int, batch: int, length: int) -> dict[str, float]:
    """How long `remat.profile` takes for transformers' GPT-2."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=16)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(config.vocab_size, (batch, length))
    start = time.perf_counter()
    found = remat.profile(model, input_ids=tokens, labels=tokens)
    return {
        "ops": len(found.ops),
        "step_s": found.seconds,
        "profile_s": time.perf_counter() - start,
        "peak_bytes": found.peak_bytes,
    }


@dataclass(frozen=True, slots=True)
class Taken:
    ops: int
    plain_s: float
    followed_s: float
    whole_s: float


def taken(step: TrainingStep, name: str) -> Taken:
    """A plain step, then a followed one."""
    followed: list[float] = []
    plain = seconds(step)
    start = time.perf_counter()
    found = follow_call(lambda: followed.append(seconds(step)), step, name, torch.device("cpu"))
    return Taken(len(found.ops), plain, followed[0], time.perf_counter() - start)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(zoo.REGISTRY))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'model':<10} {'ops':>6} {'plain':>9} {'followed':>9} {'ratio':>6} {'whole':>6}")
    for name in filter(None, options.models.split(",")):
        row = results[name] = compare(name, options.rounds)
        times = (
            f"{row['plain_s']:>7.3f} s {row['followed_s']:>7.3f} s {row['ratio']:>5.2f}x {row['whole_ratio']:>5.2f}x"
        )
        print(f"{name:<10} {row['ops']:>6} {times}", flush=True)
    row = results["gpt2"] = gpt2(options.layers, options.width, options.batch, options.length)
    print(f"GPT-2 of {options.layers} layers, {row['ops']} ops: step {row['step_s']:.1f} s, profiled in ", end="")
    print(f"{row['profile_s']:.1f} s, peak {row['peak_bytes'] / 2**30:.2f} GiB")
    save_results(options.output / "profile.json", results)


if __name__ == "__main__":
    main()
