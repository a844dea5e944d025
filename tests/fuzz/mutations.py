"""Damaged files against everything that reads files: in, a seed; out, what went wrong with the file of that seed.

A whole file of every kind that Remat reads is changed at random, byte by byte or field by field, and read by the
command that reads such files. It must end well or with one line that says what is wrong, in its time, and what it
writes must be whole. To run many: `python -m tests.fuzz.mutations --count 5000 --seed 0`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.contract import graphs
from tests.support.reports import PLAN, curve, measured
from typer.testing import CliRunner

from remat.cli import app
from remat.core import save_problem
from remat.core.devices import read_devices
from remat.core.files.problem_file import Instance, save_instance
from remat.errors import RematError
from remat.layout.csv_file import load_csv
from remat.layout.synthetic import random_lives
from remat.pytorch.costs.cost_cache import CostCache, OpCost
from remat.zoo import synthetic

LIMIT_S, SLACK_S = 1, 5.0
HANG_S = 60
"""Wall-clock, for a machine that does other things too."""
DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file: how to write a whole one, and what reads it, as a check that returns what went wrong."""

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Tally:
    files: int
    refused: int
    broken: tuple[str, ...]
    by_kind: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.files} damaged files ({self.by_kind}), {self.refused} of them refused: "
            f"{len(self.broken)} that went wrong, {self.seconds:.0f} s"
        )


class Hang(BaseException):
    """Nothing in Remat catches this by mistake."""


def run(seeds: Sequence[int], folder: Path) -> Tally:
    """The damaged file of every seed, read."""
    start, broken, refused, kinds = time.perf_counter(), list[str](), 0, Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        kind = KINDS[rng.randrange(len(KINDS))]
        path = folder / kind.name
        path.write_bytes(damaged(_whole(kind.name), rng))
        kinds[kind.name] += 1
        found = list(_guarded(kind, path))
        refused += found == [REFUSED]
        broken += [f"seed {seed}, {kind.name}: {what}" for what in found if what != REFUSED]
        for leftover in folder.iterdir():
            if leftover.name.endswith(".tmp"):
                broken.append(f"seed {seed}, {kind.name}: left {leftover.name}")
            leftover.unlink()
    by_kind = ", ".join(f"{count} {name}" for name, count in sorted(kinds.items()))
    return Tally(len(seeds), refused, tuple(broken), by_kind, time.perf_counter() - start)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The same with one to four random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        change = rng.choice((_flip, _cut, _end, _repeat, _put, _put, _change_field, _change_field, _change_field))
        content = change(content, rng)
    return content


REFUSED = "refused"
ODD_TEXTS = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1", b"0", b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"'),
    *(b"9" * 40, b"0.5", b"2e9", b'"\\u0000\\u001b[31m"', b"\xff\xfe", b"\x00", b"[" * 5000, b",", b"\n", b'"', b"-"),
    *(b"4611686018427387904", b"9223372036854775808", b"1e18", b"\xef\xbb\xbf", b"1_000", b"\xc2\xb2"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**53, 2**62, 2**63, 10**40, 0.5, -0.5, 1e-300, 1e300, "", "x", "12"),
    *("remat-plan", "[/b][red]", "\ud800", "\x1b[31m", [], {}, [0], [[]], {"name": "x"}, [None], [-1], [0, 0], [2**62]),
)


def _flip(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    at = rng.randrange(len(content))
    return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]


def _cut(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.choice((1, 2, 10, 100)) :]


def _end(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _repeat(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at : at + rng.choice((1, 5, 50, 500))] + content[at:]


def _put(content: bytes, rng: random.Random) -> bytes:
    """An odd text in place of a number or a word, or anywhere."""
    at = rng.randrange(len(content) + 1)
    end = at
    while rng.random() < 0.9 and end < len(content) and content[end : end + 1].isalnum():
        end += 1
    return content[:at] + rng.choice(ODD_TEXTS) + content[end:]


def _change_field(content: bytes, rng: random.Random) -> bytes:
    """An odd value in place of one field of a JSON document, or the field left out or there twice."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return _put(content, rng)
    at: Any = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
        if not keys:
            return _put(content, rng)
        key = rng.choice(keys)
        if not isinstance(at[key], (dict, list)) or not at[key] or rng.random() < 0.3:
            break
        at = at[key]
    action = rng.random()
    if action < 0.2:
        del at[key]
    elif action < 0.3 and isinstance(at, list):
        at.insert(key, at[key])
    elif action < 0.4 and isinstance(at[key], (int, float)) and not isinstance(at[key], bool):
        at[key] += rng.choice((1, -1, 0.5, 10**9))
    else:
        at[key] = rng.choice(ODD_VALUES)
    return json.dumps(document).encode()


@cache
def _whole(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        next(kind for kind in KINDS if kind.name == name).write(path)
        return next(file for file in Path(folder).iterdir() if file.suffix != ".lock").read_bytes()


def _guarded(kind: Kind, path: Path) -> Iterator[str]:
    """What the kind's check says, and how long it took; what it raises is wrong too."""
    start = time.process_time()
    try:
        with _no_hang():
            yield from kind.read(path)
    except Hang:
        yield f"not over after {HANG_S} s"
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
    if time.process_time() - start > LIMIT_S + SLACK_S:
        yield f"took {time.process_time() - start:.1f} s"


@contextmanager
def _no_hang() -> Iterator[None]:
    def end(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _command(*arguments: object, output: Path | None = None, whole: Callable[[Path], object] = Path.read_bytes) -> Any:
    """A check that runs one command on the file."""

    def check(path: Path) -> Iterator[str]:
        target = None if output is None else path.with_name(str(output))
        options = [] if target is None else ["--output", str(target)]
        result = CliRunner().invoke(app, [*map(str, arguments[:1]), str(path), *map(str, arguments[1:]), *options])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            yield f"raised {type(result.exception).__name__}: {result.exception}"
        if result.exit_code not in (0, 1, 2, 3, 4):
            yield f"exit code {result.exit_code}"
        if "Traceback" in result.output or "REMAT_TRACEBACK" in result.output:
            yield f"not an error of ours: {result.stderr.strip()[-300:]}"
        errors = [line for line in result.stderr.splitlines() if line.startswith("remat: error:")]
        if len(errors) != (result.exit_code != 0) or any(len(error) > 1000 for error in errors):
            yield f"exit code {result.exit_code} with {len(errors)} lines of errors"
        if target is not None and target.exists():
            whole(target)
            if result.exit_code:
                yield "an output in spite of the error"
        if result.exit_code:
            yield REFUSED

    return check


def _devices(path: Path) -> Iterator[str]:
    try:
        devices = read_devices(path)
    except RematError as error:
        yield REFUSED if "\n" not in str(error) else f"more than one line: {error}"
        return
    if not all(math.isfinite(device.bytes_per_ns) and device.memory_bytes >= 0 for device in devices):
        yield "rates that are no numbers"


def _costs(path: Path) -> Iterator[str]:
    cache = CostCache(DEVICE, path.parent)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        costs = cache.load()
        cache.add({"new": OpCost(1.0, 0)})
    if len(told) > 1:
        yield f"{len(told)} warnings"
    for cost in costs.values():
        if not (math.isfinite(cost.time_ns) and cost.time_ns >= 0 and cost.workspace_bytes >= 0):
            yield f"a cost of {cost}"
    if cache.load() != {**costs, "new": OpCost(1.0, 0)}:
        yield "what was added is not there"
    if not costs:
        yield REFUSED


def _write_costs(path: Path) -> None:
    costs = {f"aten.mm.default(float32[{size}, 64])": OpCost(size * 1.5, size) for size in range(12)}
    CostCache(DEVICE, path.parent).add(costs)


def _write_instance(path: Path) -> None:
    problem = synthetic.chain(8)
    save_instance(Instance("chain", problem.graph, problem.costs), path)


def _write_csv(path: Path) -> None:
    rows = [
        f"{item.id},{item.lower},{item.upper},{item.size},4" for item in random_lives(20, horizon=30, longest=9).buffers
    ]
    path.write_text("\n".join(("id,lower,upper,size,alignment", *rows, "")))


def _copy_devices(path: Path) -> None:
    import remat.core.devices

    path.write_bytes(Path(remat.core.devices.__file__).with_name("devices.json").read_bytes())


def _write_problem(path: Path) -> None:
    save_problem(graphs.overwriting(graphs.layered(1), 1), path)


def _write_plan(path: Path) -> None:
    PLAN.save(path)


_SOLVE = ("--budget", "0.7x", "--time-limit", LIMIT_S, "--json")
_LAYOUT = ("--time-limit", LIMIT_S, "--json")
_REPORT, _TRACE, _CSV = Path("out.report.json"), Path("out.trace.json"), Path("out.csv")
KINDS = (
    Kind("instance.json", _write_instance, _command("solve", *_SOLVE)),
    Kind("problem.json", _write_problem, _command("solve", *_SOLVE)),
    Kind("sweep.json", _write_instance, _command("solve", "--sweep", 2, "--solver", "sqrt_n", *_LAYOUT)),
    Kind("plan.json", _write_plan, _command("report", "--json", output=_REPORT)),
    Kind("arena.json", _write_plan, _command("layout", *_LAYOUT, output=_CSV, whole=load_csv)),
    Kind("profile.json", lambda path: measured().save(path), _command("report", "--json", output=_TRACE)),
    Kind("curve.json", lambda path: curve().save(path), _command("report", "--json", output=_REPORT)),
    Kind("buffers.csv", _write_csv, _command("layout", *_LAYOUT, output=_CSV, whole=load_csv)),
    Kind("devices.json", _copy_devices, _devices),
    Kind(f"{DEVICE}.json", _write_costs, _costs),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = run(range(options.seed, options.seed + options.count), Path(folder))
    print(*tally.broken, tally, sep="\n")


if __name__ == "__main__":
    os.environ.pop("REMAT_TRACEBACK", None)
    sys.exit(main())
