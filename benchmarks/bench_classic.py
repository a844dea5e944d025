"""The classic experiments: `remat bench`, with its facts kept among the results.

    python -m benchmarks.bench_classic [--device cuda] [--quick] [--output benchmarks/results]

Tables and pictures go to the folder `bench_DEVICE` beside the facts, which is not kept with the sources.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from benchmarks.runs import note_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    folder = options.output / f"bench_{options.device}"
    command = [sys.executable, "-m", "remat", "bench", "--device", options.device, "--output", str(folder)]
    subprocess.run([*command, *(["--quick"] if options.quick else [])], check=True)
    path = options.output / f"bench_{options.device}.json"
    shutil.copy(folder / "bench.json", path)
    note_run(path)


if __name__ == "__main__":
    main()
