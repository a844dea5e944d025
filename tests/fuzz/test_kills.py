"""Writers that are killed, and many at once: a file is the old one or the new one, and nothing is lost or left behind.

A few kills in every run, a hundred with `--long`. To run many: `python -m tests.fuzz.test_kills --count 100 --seed 0`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from remat.core import load_plan
from remat.pytorch.costs.cost_cache import CostCache, OpCost

DEVICE = "device"
CACHE_WRITER = """
import sys
from pathlib import Path
from remat.pytorch.costs.cost_cache import CostCache, OpCost
cache = CostCache("device", Path(sys.argv[1]))
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    cache.add({f"op {number} {part}": OpCost(float(number), part) for part in range(200)})
    print(number, flush=True)
    number += 1
"""
PLAN_WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.unit.core.plans import small_plan
plan = small_plan()
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    replace(plan, breakdown_bytes=(("parameters", number),)).save(Path(sys.argv[1]) / "plan.json")
    print(number, flush=True)
    number += 1
"""
TEXTS = 5
"""Parts of what one of the writers adds that are looked for."""


def kill_at_a_random_moment(writer: str, folder: Path, first: int, rng: random.Random) -> int:
    """Run `writer`, kill it within a tenth of a second of its start; returns the last number it finished."""
    child = subprocess.Popen(
        [sys.executable, "-c", writer, str(folder), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(rng.uniform(0.0, 0.1))
    os.kill(child.pid, signal.SIGKILL)
    finished = child.stdout.read().split()
    child.stdout.close()
    child.wait()
    return int(finished[-1]) if finished else first - 1


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp")]


def kill_cache_writers(folder: Path, count: int, seed: int) -> int:
    """Kill `count` writers of one cache one after another; returns the most leftovers that were there at once."""
    rng, cache, first, most = random.Random(seed), CostCache(DEVICE, folder), 0, 0
    for _ in range(count):
        last = kill_at_a_random_moment(CACHE_WRITER, folder, first, rng)
        found = cache.load()
        for number in range(last + 1):
            assert all(f"op {number} {part}" in found for part in range(0, 200, 200 // TEXTS)), number
        # The one that was being added is there as a whole or not at all.
        assert len(found) in (200 * (last + 1), 200 * (last + 2))
        most = max(most, len(leftovers(folder)))
        first = len(found) // 200
    cache.add({"op": OpCost(0.0, 0)})
    assert leftovers(folder) == []
    return most


def kill_plan_writers(folder: Path, count: int, seed: int) -> int:
    """The same for writers of one plan."""
    rng, first, most = random.Random(seed), 0, 0
    path = folder / "plan.json"
    for _ in range(count):
        last = kill_at_a_random_moment(PLAN_WRITER, folder, first, rng)
        if last >= 0:
            ((_, number),) = load_plan(path).breakdown_bytes
            assert number in (last, last + 1)
            first = number + 1
        most = max(most, len(leftovers(folder)))
    if path.exists():
        load_plan(path).save(path)
        assert leftovers(folder) == []
    return most


def test_killed_writers_of_a_cache_leave_it_whole(tmp_path: Path) -> None:
    assert kill_cache_writers(tmp_path, 4, seed=0) <= 1


def test_killed_writers_of_a_plan_leave_the_old_or_the_new_one(tmp_path: Path) -> None:
    assert kill_plan_writers(tmp_path, 3, seed=1) <= 1


@pytest.mark.long
def test_a_hundred_killed_writers_leave_whole_files(tmp_path: Path) -> None:
    for kill in (kill_cache_writers, kill_plan_writers):
        (tmp_path / kill.__name__).mkdir()
        assert kill(tmp_path / kill.__name__, 50, seed=2) <= 1


def test_threads_that_add_to_one_cache_lose_nothing(tmp_path: Path) -> None:
    cache = CostCache(DEVICE, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: cache.add({f"op {number}": OpCost(1.0, number)}), range(60)))
    assert cache.load() == {f"op {number}": OpCost(1.0, number) for number in range(60)}
    assert leftovers(tmp_path) == []


def test_processes_that_are_killed_take_nothing_of_those_that_go_on(tmp_path: Path) -> None:
    """One process adds to the cache while others are killed in the middle of adding to it."""
    cache = CostCache(DEVICE, tmp_path)
    rng = random.Random(3)
    for number in range(3):
        kill_at_a_random_moment(CACHE_WRITER, tmp_path, 1000 * number, rng)
        cache.add({f"mine {number}": OpCost(1.0, number)})
    assert {f"mine {number}" for number in range(3)} <= cache.load().keys()
    assert leftovers(tmp_path) == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, most = time.perf_counter(), 0
    for share, kill in (
        (options.count // 2, kill_cache_writers),
        (options.count - options.count // 2, kill_plan_writers),
    ):
        with tempfile.TemporaryDirectory() as folder:
            most = max(most, kill(Path(folder), share, options.seed))
    seconds = time.perf_counter() - start
    print(f"{options.count} writers killed: every file whole, at most {most} leftovers at once, {seconds:.0f} s")


if __name__ == "__main__":
    main()
