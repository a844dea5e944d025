"""Where and how a results file was made: `runs.json` beside it, which the benchmarks page is made from.

In: a results file that was just written. Out: its entry in `runs.json`: date, machine, versions, command.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = "runs.json"


def save_results(path: Path, results: Any, device: str = "") -> None:
    """Write `results` to `path` as JSON, and beside it how they were made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    note_run(path, device)


def note_run(path: Path, device: str = "") -> None:
    """Note when, where and by which command `path` was written; `device` is told where it was not the CPU."""
    runs = read_runs(path.parent)
    runs[path.name] = {
        "date": date.today().isoformat(),
        "machine": device or f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "torch": metadata.version("torch"),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
    }
    text = json.dumps(dict(sorted(runs.items())), indent=1)
    (path.parent / NAME).write_text(text + "\n", encoding="utf-8")


def read_runs(folder: Path) -> dict[str, Any]:
    """What is known of each results file in `folder`."""
    path = folder / NAME
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
