"""Capture the training steps of the zoo's models as problem files, for benchmarks of solvers that need no framework.

    python -m benchmarks.capture_instances [--models gpt,bert,...] [--output benchmarks/instances]

Each file holds the op graph of one forward and backward step at "demo" size: sizes counted in bytes, times measured on
the CPU with one thread and rounded to whole nanoseconds. The step itself does not run; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import remat
from remat import zoo
from remat.core import Problem, save_problem
from remat.core.problem import LARGEST_BYTES

GPT2 = {"gpt2-small": {}, "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16}}
"""Of transformers, by what differs from its default sizes."""
MODELS = (*zoo.REGISTRY, *GPT2)


def build(name: str) -> zoo.Example:
    if name not in GPT2:
        return zoo.build(name, scale="demo")
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2[name])
    tokens = torch.randint(config.vocab_size, (4, 512))
    return zoo.Example(transformers.GPT2LMHeadModel(config), (), {"input_ids": tokens, "labels": tokens})


def capture(name: str) -> Problem:
    """The problem of one training step, with no limit on memory."""
    example = build(name)
    problem = remat.plan(example.model, *example.args, budget="50x", solver="none", **example.kwargs).problem
    times = tuple(round(time) for time in problem.costs.time_ns)
    return replace(
        problem,
        graph=replace(problem.graph, name=name),
        costs=replace(problem.costs, time_ns=times),
        budget_bytes=LARGEST_BYTES,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "instances")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.models.split(","):
        path = options.output / f"{name}.json"
        problem = capture(name)
        save_problem(problem, path)
        print(f"{path.name}: {len(problem.graph.ops)} ops, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
