"""Work in a process of its own, which is ended when its time is up.

For libraries that miss their time limit, or that cannot be loaded beside another one. In: the module whose `main` reads
standard input and writes standard output, and what it reads. Out: what it wrote; None where it had to be ended.
"""

from __future__ import annotations

import os
import subprocess
import sys

GRACE_S = 2.0
"""How long a process may go on after its time limit."""


def run_child(module: str, message: bytes, time_limit_s: float) -> bytes | None:
    """Run `module.main()` on `message`; raises `RuntimeError` with its last words where it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"from {module} import main; main()"],
            input=message,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=time_limit_s + GRACE_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        words = done.stderr.decode(errors="replace")[-500:]
        raise RuntimeError(f"{module} ended with code {done.returncode}: {words}")
    return done.stdout
