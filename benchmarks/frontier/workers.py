"""Processes that train, one for each configuration, and what they answer.

In: a request. Out: an `Answer` to each question, in time or not at all. A worker gets ready beside others, since most
of that is compilation on the CPU, and then waits until it is asked to time steps with the device to itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frontier.rows import Status

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the workers share: caches on disk, and how many threads each compiles with."""

    cache: Path
    logs: Path
    compile_threads: int = 2
    allocator: str = ""
    """PYTORCH_CUDA_ALLOC_CONF."""

    def environment(self) -> dict[str, str]:
        """Caches are shared, so that what one run compiled the next one finds."""
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        found = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "REMAT_CACHE_DIR": str(self.cache / "remat"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(self.compile_threads),
            "HF_HUB_OFFLINE": "1",
        }
        return found | ({"PYTORCH_CUDA_ALLOC_CONF": self.allocator} if self.allocator else {})

    @property
    def are_warm(self) -> bool:
        return (self.cache / "inductor").is_dir()


@dataclass(frozen=True, slots=True)
class Answer:
    """Fields of what was asked for, or why there are none."""

    fields: Mapping[str, Any] | None
    status: Status = Status.RAN
    reason: str = ""


class Worker:
    """One process. Its group is its own, so that whatever it starts ends with it."""

    def __init__(self, request: Mapping[str, Any], name: str, surroundings: Surroundings) -> None:
        surroundings.logs.mkdir(parents=True, exist_ok=True)
        self._log = surroundings.logs / f"{name.replace('/', '_')}.log"
        self._left = b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.frontier.worker", json.dumps(request)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=surroundings.environment(),
                process_group=0,
            )

    def ready(self, limit_s: float) -> Answer:
        return self._answer("ready", limit_s)

    def time(self, steps: int, limit_s: float) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return Answer(None, Status.FAILED, self._last_words())
        return self._answer("timed", limit_s)

    def end(self) -> None:
        # A group that is gone is what was wanted.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _answer(self, wanted: str, limit_s: float) -> Answer:
        line = self._read_line(time.monotonic() + limit_s)
        if line is None:
            return Answer(None, Status.NOT_REACHED, f"no answer within {limit_s:.0f} s")
        if not line:
            return Answer(None, Status.FAILED, self._last_words())
        message = json.loads(line)
        if wanted in message:
            return Answer(message[wanted])
        failed = message["failed"]
        return Answer(None, Status(failed["status"]), failed["reason"])

    def _read_line(self, deadline: float) -> bytes | None:
        """The next line; empty where the process has ended, None where the time has."""
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._left:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([handle], [], [], remaining)[0]:
                return None
            read = os.read(handle, 65536)
            if not read:
                return b""
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"the process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"[:300]
