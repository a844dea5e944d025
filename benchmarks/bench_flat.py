"""Does anything grow? Thousands of steps of one optimized model, and a notebook's cell that is run again and again.

    python -m benchmarks.bench_flat [--steps 5000] [--reruns 20] [--device cuda]

Prints live bytes, the process's resident memory and the time of a step, a line for each tenth of the steps, and the
same after each time that a model is made, optimized, trained for four steps and dropped.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import remat

LINES = 10
BATCH = 512
STEPS_OF_A_CELL = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--reruns", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    # Two threads that wait for each other on a busy machine would tell of the machine alone.
    torch.set_num_threads(1)
    print("   step      live B   RSS MiB  step ms")
    for line in train(asked.steps, asked.device):
        print(line, flush=True)
    print("  rerun      live B   RSS MiB")
    for line in run_cells(asked.reruns, asked.device):
        print(line, flush=True)


def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    model(torch.randn(BATCH, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(steps: int, device: str) -> Iterator[str]:
    model, optimizer = make(device)
    optimized = remat.optimize(model, "0.7x", optimizer=optimizer, progress=False)
    times: list[float] = []
    for number in range(1, steps + 1):
        began = time.perf_counter()
        step(optimized, optimizer, device)
        times.append(time.perf_counter() - began)
        if number % max(1, steps // LINES) == 0:
            yield f"{number:7} {live_bytes():11,} {rss_mib():9.1f} {1e3 * statistics.median(times):8.3f}"
            times.clear()


def run_cells(reruns: int, device: str) -> Iterator[str]:
    for number in range(1, reruns + 1):
        model, optimizer = make(device)
        optimized = remat.optimize(model, "0.7x", optimizer=optimizer, progress=False)
        for _ in range(STEPS_OF_A_CELL):
            step(optimized, optimizer, device)
        del model, optimizer, optimized
        yield f"{number:7} {live_bytes():11,} {rss_mib():9.1f}"


def live_bytes() -> int:
    """Of all tensors that Python can reach, each storage once."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter)
    storages = (item.untyped_storage() for item in gc.get_objects() if type(item) in kinds)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
